"""Compares the caches that `grpo` and `huggingface_hub` write, and reads each with the other program.

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
            compare(Programs(sys.argv[1], folder, f"http://127.0.0.1:{hub.server_port}"), hub, policy, rows)
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


if __name__ == "__main__":
    main()
