"""Compares the caches and repositories that `grpo` and `huggingface_hub` write, and reads each with the other program.

    scripts/hub/compare.py target/debug/grpo

`scripts/test-hub` calls it. The model is a decoder with random weights and one token for each character.
"""

import json
import os
import random
import struct
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import server  # noqa: E402

MODEL, PRIVATE, DATA = "org/policy", "org/private", "datasets/org/rows"
READ = ["config.json", "generation_config.json", "tokenizer*.json", "*.safetensors"]
RUN = f"""
model: {MODEL}@v1
data: {{train: "hf://{DATA}/d/train.jsonl", held_out: "hf://{DATA}/d/test.jsonl"}}
rewards: [{{kind: regex, pattern: "^[ab]"}}]
prompts_per_step: 2
num_generations: 2
sampling: {{max_new_tokens: 4}}
evaluation: {{every_steps: 2}}
max_steps: 2
run_dir: run
"""


def write_model(folder):
    """Writes a Llama of one block."""
    folder.mkdir(parents=True)
    vocabulary = ["<eos>", *"abcde"]
    hidden, wide = 8, 12
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": len(vocabulary), "hidden_size": hidden,
        "intermediate_size": wide, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
        "max_position_embeddings": 32, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
        "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False, "eos_token_id": 0,
    }
    tokenizer = {
        "version": "1.0",
        "added_tokens": [{"id": 0, "content": "<eos>", "special": True, "single_word": False, "lstrip": False,
                          "rstrip": False, "normalized": False}],
        "normalizer": None,
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "[\\s\\S]"}, "behavior": "Isolated", "invert": False},
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": {token: i for i, token in enumerate(vocabulary)}, "unk_token": "<unk>"},
    }
    block = "model.layers.0."
    shapes = {"model.embed_tokens.weight": (len(vocabulary), hidden), "lm_head.weight": (len(vocabulary), hidden),
              "model.norm.weight": (hidden,), block + "input_layernorm.weight": (hidden,),
              block + "post_attention_layernorm.weight": (hidden,), block + "mlp.gate_proj.weight": (wide, hidden),
              block + "mlp.up_proj.weight": (wide, hidden), block + "mlp.down_proj.weight": (hidden, wide)}
    shapes |= {f"{block}self_attn.{name}_proj.weight": (hidden, hidden) for name in "qkvo"}
    numbers = random.Random(0)
    header, values = {}, b""
    for name, shape in shapes.items():
        count = shape[0] * (shape[1] if len(shape) > 1 else 1)
        floats = [1.0 if "norm" in name else numbers.gauss(0, 0.3) for _ in range(count)]
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [len(values), len(values) + 4 * count]}
        values += struct.pack(f"<{count}f", *floats)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + values)
    for name, contents in {"config.json": config, "tokenizer.json": tokenizer, "generation_config.json": {"eos_token_id": 0},
                           "tokenizer_config.json": {"eos_token": "<eos>"}}.items():
        (folder / name).write_text(json.dumps(contents))
    (folder / "README.md").write_text("# Not read\n")


def write_rows(folder):
    (folder / "d").mkdir(parents=True)
    for name, prompts in {"train": ["ab", "ba", "ce", "d"], "test": ["e", "cc"]}.items():
        rows = "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts)
        (folder / "d" / f"{name}.jsonl").write_text(rows)


def cache(home):
    """The entries of the cache that both programs write: links with their targets, other files with their contents."""
    found = {}
    for path in sorted((home / "hub").glob("*--*/**/*")):
        name = path.relative_to(home / "hub")
        if name.parts[1] not in ("blobs", "refs", "snapshots"):
            continue
        if path.is_symlink():
            found[str(name)] = os.readlink(path)
        elif path.is_file():
            found[str(name)] = path.read_bytes()
    return found


def check(condition, what):
    if not condition:
        sys.exit(f"test-hub: failed: {what}")
    print(f"test-hub: ok: {what}")


class Programs:
    """Both programs with the variables of a test."""

    def __init__(self, grpo, folder, endpoint):
        self.grpo, self.folder, self.endpoint = Path(grpo).resolve(), folder, endpoint

    def run(self, command, home, **variables):
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING", "TRANSFORMERS_"))}
        kept |= {"HF_HOME": str(home), "HF_ENDPOINT": self.endpoint, "HF_HUB_DISABLE_TELEMETRY": "1", **variables}
        return subprocess.run(command, env=kept, cwd=self.folder, capture_output=True, text=True)

    def ran(self, *arguments, **variables):
        done = self.run([self.grpo, *arguments], **variables)
        if done.returncode != 0:
            sys.exit(f"test-hub: failed: grpo {' '.join(arguments)}\n{done.stderr}")
        return done.stdout

    def python(self, code, home, **variables):
        done = self.run([sys.executable, "-c", f"from huggingface_hub import *\n{code}"], home, **variables)
        if done.returncode != 0:
            sys.exit(f"test-hub: failed: {code}\n{done.stderr}")
        return done.stdout.strip()


def main():
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_model(folder / "policy")
        write_rows(folder / "rows")
        policy = server.Repository(folder / "policy")
        rows = server.Repository(folder / "rows")
        private = server.Repository(folder / "policy", private=True)
        hub = server.start({MODEL: policy, PRIVATE: private, DATA: rows})
        threading.Thread(target=hub.serve_forever, daemon=True).start()
        try:
            programs = Programs(sys.argv[1], folder, f"http://127.0.0.1:{hub.server_port}")
            compare(programs, hub, policy, rows)
            for part_size in (None, 500):
                hub.part_size = part_size
                hub.objects.clear()
                compare_uploads(programs, hub, "parts" if part_size else "whole")
        finally:
            hub.shutdown()


def compare(programs, hub, policy, rows):
    ours, theirs = programs.folder / "ours", programs.folder / "theirs"
    snapshot = f"snapshot_download({MODEL!r}, revision='v1', allow_patterns={READ})"
    file = "hf_hub_download('org/rows', 'd/{}.jsonl', repo_type='dataset')"
    offline = {"HF_HUB_OFFLINE": "1", "HF_ENDPOINT": "http://127.0.0.1:9"}

    programs.python(snapshot, theirs)
    for name in ("train", "test"):
        programs.python(file.format(name), theirs)
    (programs.folder / "run.yaml").write_text(RUN)
    programs.ran("check", "run.yaml", home=ours)
    check(not any(name.endswith(".safetensors") for name in cache(ours)), "grpo check downloads no weights")
    programs.ran("train", "run.yaml", home=ours)
    inputs = json.loads((programs.folder / "run/inputs.json").read_text())
    check(inputs["hub"] == {f"{MODEL}@v1": policy.commit, DATA: rows.commit}, "grpo train records the commits")
    found, expected = cache(ours), cache(theirs)
    for name in sorted(found.keys() | expected.keys()):
        check(name in found and name in expected and found[name] == expected[name], f"same in both caches: {name}")
    check(len(found) == 16, "the caches have blobs, references and links")

    commit = programs.python(f"print({snapshot}.split('/')[-1])", ours, **offline)
    check(commit == policy.commit, "huggingface_hub reads the cache of grpo offline")
    asked = len(hub.log)
    programs.ran("train", "run.yaml", "--replace", home=theirs, **offline)
    check(len(hub.log) == asked, "grpo trains from the cache of huggingface_hub offline, without a request")

    # One cache for both: what one program has downloaded the other one does not download again.
    asked = len(hub.log)
    programs.python(snapshot, ours)
    check(not any(path.startswith("storage/") for _, path, _ in hub.log[asked:]), "huggingface_hub reuses the blobs of grpo")
    asked = len(hub.log)
    programs.ran("sample", MODEL, "ab", "--max-new-tokens", "4", home=theirs)
    check(not any(path.startswith("storage/") for _, path, _ in hub.log[asked:]), "grpo reuses the blobs of huggingface_hub")

    refused = programs.run([programs.grpo, "sample", PRIVATE, "ab"], ours)
    check(refused.returncode == 5 and "HF_TOKEN" in refused.stderr, "grpo asks for the token of a private model")
    asked = len(hub.log)
    programs.ran("sample", PRIVATE, "ab", "--max-new-tokens", "4", home=ours, HF_TOKEN=server.TOKEN)
    third = programs.folder / "third"
    third.mkdir()
    path = programs.python("from huggingface_hub import constants\nprint(constants.HF_TOKEN_PATH)", third)
    Path(path).write_text(server.TOKEN)
    programs.ran("sample", PRIVATE, "ab", "--max-new-tokens", "4", home=third)
    stored = [token for _, path, token in hub.log[asked:] if path.startswith("storage/")]
    check(len(stored) == 2 and not any(stored), "grpo sends the token, of the variable or the file, to the hub alone")


def fields(write):
    """The fields of an upload's request that do not depend on the program."""
    path, sent, headers = write
    if isinstance(sent, bytes):
        return path, headers["Content-Length"], server.sha256(sent), headers.get("Authorization")
    first, *lines = sent
    media = headers["Content-Type"]
    if path.endswith("/create"):
        visibility = {True: "private", False: "public"}
        return path, first.get("type", "model"), first["organization"], first.get("visibility") or visibility[first["private"]], media
    if path.endswith("/batch"):
        objects = sorted(json.dumps(asked, sort_keys=True) for asked in first.pop("objects"))
        return path, json.dumps(first, sort_keys=True), tuple(objects), headers["Accept"], media
    if "/preupload/" in path:
        first["files"].sort(key=lambda file: file["path"])
    lines = sorted(json.dumps(line, sort_keys=True) for line in lines)
    return path, json.dumps(first, sort_keys=True), tuple(lines), media.split(";")[0]


def compare_uploads(programs, hub, name):
    """Uploads a folder with both programs. `name` is that of the repository."""
    folder, home = programs.folder / "policy", programs.folder / "push"
    (folder / "möre").mkdir(exist_ok=True)
    (folder / "möre" / "模型 1.json").write_text("{}")
    (folder / "möre" / "empty").write_text("")
    variables = {"home": home, "HF_TOKEN": server.TOKEN, "HF_HUB_DISABLE_XET": "1"}
    (home / "hub").mkdir(parents=True, exist_ok=True)

    def python(repository):
        programs.python(f"""
api = HfApi()
api.create_repo({repository!r}, private=True, exist_ok=True)
api.upload_folder(repo_id={repository!r}, folder_path="policy", commit_message="Upload")
""", **variables)

    def grpo(repository):
        return programs.ran("push", "policy", repository, "--message", "Upload", **variables)

    def writes(upload, repository):
        """The requests of an upload, as if the repository were `org/name`."""
        hub.writes.clear()
        upload(repository)
        text = [repr(fields(write)).replace(repository, "org/name") for write in hub.writes]
        return sorted(text)

    theirs = writes(python, f"org/{name}-theirs")
    hub.objects.clear()
    ours = writes(grpo, f"org/{name}-ours")
    puts = [write for write in ours if "/storage/" in write]
    check(len(puts) == (-(-len((folder / "model.safetensors").read_bytes()) // 500) if name == "parts" else 1), f"{name}: one PUT a part")
    for write in sorted({*ours, *theirs}):
        check(write in ours and write in theirs, f"{name}: both sent {write[:100]}")
    found, expected = (hub.repositories[f"org/{name}-{whose}"] for whose in ("ours", "theirs"))
    check(found.private and expected.private, f"{name}: both repositories are private")
    check(found.files == expected.files == server.Repository(folder).files, f"{name}: both repositories have the files of the folder")

    again = [write for write in writes(grpo, f"org/{name}-theirs") if "/storage/" in write or "/commit/" in write]
    check(not again, f"{name}: grpo sends nothing that huggingface_hub has uploaded")
    again = [write for write in writes(python, f"org/{name}-ours") if "/storage/" in write or "/commit/" in write]
    check(not again, f"{name}: huggingface_hub sends nothing that grpo has uploaded")
    programs.ran("sample", f"org/{name}-ours", "ab", "--max-new-tokens", "4", home=home, HF_TOKEN=server.TOKEN)


if __name__ == "__main__":
    main()
