"""Times generation beside transformers in alternation, and reports medians.

Both use the models of benches/models with random weights in f32 and bf16, temperature 1 over the whole vocabulary, and completions of
fixed length. The side of candle-grpo is a process that reads one case per line and prints seconds. Writes
target/bench/generation.json and generation.md.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from models import MODELS, config

torch.set_num_threads(2)

# Prompts, completions per prompt, prompt tokens, new tokens.
CASES = [(1, 1, 128, 64), (2, 8, 128, 64), (8, 8, 128, 64)]


DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}

# The model that is timed by parts, and beside vLLM.
SMOLLM2_135M = "smollm2-135m"


def transformers_run(model, prompts, generations, prompt_tokens, new_tokens):
    ids = torch.randint(1, model.config.vocab_size, (prompts, prompt_tokens))
    drawing = GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, max_new_tokens=new_tokens, min_new_tokens=new_tokens,
        num_return_sequences=generations, pad_token_id=0, eos_token_id=None, bos_token_id=None,
    )
    start = time.perf_counter()
    tokens = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=drawing)
    seconds = time.perf_counter() - start
    assert tokens.shape == (prompts * generations, prompt_tokens + new_tokens), tokens.shape
    return seconds


class Side:
    """A side in a separate process, which reads cases and prints seconds."""

    def __init__(self, *command):
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(self, *case):
        self.process.stdin.write("\t".join(map(str, case)) + "\n")
        self.process.stdin.flush()
        seconds = self.process.stdout.readline()
        if not seconds:
            sys.exit(f"{self.process.args} ended")
        return float(seconds)

    def end(self):
        self.process.stdin.close()
        self.process.wait()


def arguments(description):
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("program", help="our program, target/release/generation")
    parser.add_argument("--only", default="", help="only models whose name contains this")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("target/bench"))
    return parser.parse_args()


def measure(program, name, dtype, rounds):
    ours = Side(program, "--model", str(MODELS / f"{name}.json"), "--dtype", dtype)
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config(name)).eval().to(DTYPES[dtype])
    for case in CASES:
        prompts, generations, prompt_tokens, new_tokens = case
        ours.run(prompts, generations, prompt_tokens, 2)
        transformers_run(model, prompts, generations, prompt_tokens, 2)
        pairs = [(ours.run(*case), transformers_run(model, *case)) for _ in range(rounds)]
        tokens = prompts * generations * new_tokens
        row = {
            "model": name,
            "dtype": dtype,
            "prompts": prompts,
            "num_generations": generations,
            "prompt_tokens": prompt_tokens,
            "new_tokens": new_tokens,
            "ours_tokens_s": tokens / statistics.median(a for a, _ in pairs),
            "transformers_tokens_s": tokens / statistics.median(b for _, b in pairs),
            "ratio": statistics.median(b / a for a, b in pairs),
        }
        print(f"{name}, {dtype}, {prompts} x {generations}: ours {row['ours_tokens_s']:.1f} tokens/s, transformers "
              f"{row['transformers_tokens_s']:.1f}, ratio {row['ratio']:.2f}", flush=True)
        yield row
    ours.end()


def main():
    args = arguments(__doc__)
    names = sorted(file.stem for file in MODELS.glob("*.json") if args.only in file.stem)
    rows = [row for name in names for dtype in DTYPES for row in measure(args.program, name, dtype, args.rounds)]
    args.out.mkdir(parents=True, exist_ok=True)
    parts = {}
    for dtype in DTYPES:
        done = subprocess.run([args.program, "--parts", "--dtype", dtype], check=True, capture_output=True, text=True)
        parts[dtype] = json.loads(done.stdout)
    report = {"generation": rows, "parts": parts}
    (args.out / "generation.json").write_text(json.dumps(report, indent=2) + "\n")
    lines = ["| model | dtype | prompts x completions | ours tokens/s | transformers tokens/s | ratio |",
             "| --- | --- | --- | ---: | ---: | ---: |"]
    lines += [
        f"| {r['model']} | {r['dtype']} | {r['prompts']} x {r['num_generations']} | {r['ours_tokens_s']:.1f} | {r['transformers_tokens_s']:.1f} | "
        f"{r['ratio']:.2f} |"
        for r in rows
    ]
    (args.out / "generation.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
