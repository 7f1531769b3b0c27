"""Tries an installed program: `grpo init`, `check`, `train` and `report`, with a tiny model of random weights.

    python3 try_program.py GRPO FOLDER

FOLDER must not exist. It is left behind if a command fails.
"""

import json
import random
import struct
import subprocess
import sys
from pathlib import Path

HIDDEN, INNER, HEAD, HEADS, LAYERS = 32, 64, 8, 4, 2
# The tokens: the end, and the characters of ASCII that `grpo init` writes.
VOCABULARY = ["<eos>", "\n", *map(chr, range(32, 127))]


def config():
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "eos_token_id": 0,
        "head_dim": HEAD,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "max_position_embeddings": 512,
        "num_attention_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": HEADS,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "vocab_size": len(VOCABULARY),
    }


def tokenizer():
    end = {"id": 0, "content": VOCABULARY[0], "special": True}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {
        "version": "1.0",
        "added_tokens": [{**end, **flags}],
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "[\\s\\S]"}, "behavior": "Isolated", "invert": False},
        "decoder": {"type": "Fuse"},
        "model": {
            "type": "WordLevel",
            "vocab": {text: token for token, text in enumerate(VOCABULARY)},
            "unk_token": VOCABULARY[0],
        },
    }


def shapes():
    """Yields the name and the shape of each weight."""
    yield "model.embed_tokens.weight", [len(VOCABULARY), HIDDEN]
    yield "model.norm.weight", [HIDDEN]
    for layer in range(LAYERS):
        block = f"model.layers.{layer}"
        yield f"{block}.input_layernorm.weight", [HIDDEN]
        yield f"{block}.post_attention_layernorm.weight", [HIDDEN]
        for name in "qkvo":
            yield f"{block}.self_attn.{name}_proj.weight", [HIDDEN, HIDDEN]
        yield f"{block}.mlp.gate_proj.weight", [INNER, HIDDEN]
        yield f"{block}.mlp.up_proj.weight", [INNER, HIDDEN]
        yield f"{block}.mlp.down_proj.weight", [HIDDEN, INNER]


def write_weights(path):
    """Writes random weights in the format of safetensors. Those of norms are 1."""
    draw = random.Random(0)
    header, data = {}, bytearray()
    for name, shape in shapes():
        count = shape[0] * (shape[1] if len(shape) == 2 else 1)
        values = [draw.gauss(0, 0.1) if len(shape) == 2 else 1.0 for _ in range(count)]
        start = len(data)
        data += struct.pack(f"<{count}f", *values)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [start, len(data)]}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def write_model(folder):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config()))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer()))
    template = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
    special = {"eos_token": VOCABULARY[0], "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(special))
    write_weights(folder / "model.safetensors")


def replaced(text, old, new):
    if old not in text:
        sys.exit(f"run.yaml of `grpo init`: {old!r} is missing, so this script cannot change it")
    return text.replace(old, new)


def main():
    grpo, folder = str(Path(sys.argv[1]).absolute()), Path(sys.argv[2])
    folder.mkdir(parents=True)

    def run(*arguments):
        print("$ grpo", *arguments, flush=True)
        done = subprocess.run([grpo, *arguments], cwd=folder, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{done.stdout}{done.stderr}grpo {' '.join(arguments)}: exit code {done.returncode}, must be 0")
        return done.stdout

    print(run("--version").strip())
    run("init", "math")
    write_model(folder / "model")
    text = (folder / "math/run.yaml").read_text()
    text = replaced(text, '"Qwen/Qwen2.5-0.5B-Instruct"', "model")
    text = replaced(text, "max_new_tokens: 256", "max_new_tokens: 8")
    text = replaced(text, "max_steps: 100", "max_steps: 2")
    text = replaced(text, "decay_until: 100", "decay_until: 6")
    (folder / "run.yaml").write_text(text)
    run("check", "run.yaml")
    run("train", "run.yaml")
    run("report", "runs/math")
    metrics = (folder / "runs/math/metrics.jsonl").read_text().splitlines()
    if len(metrics) != 2:
        sys.exit(f"metrics.jsonl: {len(metrics)} lines, must be 2")


if __name__ == "__main__":
    main()
