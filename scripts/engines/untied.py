"""Prints a folder with the weights of MODEL and a separate output layer: python untied.py MODEL CACHE.

vLLM on the CPU does not update a tied output layer when it reloads weights. In the printed folder the output layer is a tensor
of its own, so the server updates it. The folder has links to the files of MODEL, a config.json without tied embeddings,
and lm_head.safetensors. A model without tied embeddings needs no copy: its own path is printed.
"""

import hashlib
import json
import os
import shutil
import sys
from pathlib import Path

INDEX = "model.safetensors.index.json"
EMBEDDING = "model.embed_tokens.weight"
OUTPUT = "lm_head.weight"


def untied(model, cache):
    from safetensors import safe_open
    from safetensors.torch import save_file

    config = json.loads((model / "config.json").read_text())
    # Families differ in the default of tie_word_embeddings; the weights decide.
    files = sorted(model.glob("*.safetensors"))
    if not files:
        sys.exit(f"{model}: must contain *.safetensors")
    where = {}
    for file in files:
        with safe_open(file, "pt") as tensors:
            where.update(dict.fromkeys(tensors.keys(), file.name))
    if OUTPUT in where and config.get("tie_word_embeddings") is not True:
        return model
    if EMBEDDING not in where:
        sys.exit(f"{model}: has neither {OUTPUT} nor {EMBEDDING}")

    state = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(model.iterdir())]
    name = hashlib.sha256(repr((str(model), state)).encode()).hexdigest()[:16]
    folder = cache / name
    if folder.is_dir():
        return folder
    partial = cache / f"{name}.{os.getpid()}"
    partial.mkdir(parents=True)
    for path in model.iterdir():
        if path.name not in ("config.json", INDEX) and path.is_file():
            (partial / path.name).symlink_to(path)
    with safe_open(model / where[EMBEDDING], "pt") as tensors:
        save_file({OUTPUT: tensors.get_tensor(EMBEDDING)}, partial / "lm_head.safetensors", metadata={"format": "pt"})
    where[OUTPUT] = "lm_head.safetensors"
    (partial / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))
    (partial / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}, indent=2))
    try:
        partial.rename(folder)
    except OSError:  # another server made the same folder
        shutil.rmtree(partial)
    return folder


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: untied.py MODEL CACHE")
    print(untied(Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve()))
