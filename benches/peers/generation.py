"""Times generation beside transformers in alternation, and reports medians.

Both use the models of benches/models with random weights in f32 and bf16, temperature 1 over the whole vocabulary, and completions of
fixed length. The side of candle-grpo is a process that reads one case per line and prints seconds. Writes
target/bench/generation.json and generation.md. On a GPU the models are those of benches/models/cuda, in bf16.
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

from models import config, models

torch.set_num_threads(2)

# Prompts, completions per prompt, prompt tokens, new tokens.
CASES = [(1, 1, 128, 64), (2, 8, 128, 64), (8, 8, 128, 64)]


DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}

# The model that is timed by parts, and beside vLLM.
SMOLLM2_135M = "smollm2-135m"


def transformers_run(model, prompts, generations, prompt_tokens, new_tokens):
    ids = torch.randint(1, model.config.vocab_size, (prompts, prompt_tokens), device=model.device)
    drawing = GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, max_new_tokens=new_tokens, min_new_tokens=new_tokens,
        num_return_sequences=generations, pad_token_id=0, eos_token_id=None, bos_token_id=None,
    )
    start = time.perf_counter()
    tokens = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=drawing).cpu()
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


def arguments_of(description):
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("program", help="our program, target/release/generation")
    parser.add_argument("--only", default="", help="only models whose name contains this")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("target/bench"))
    return parser


def measure(program, device, name, file, dtype, rounds):
    ours = Side(program, "--model", str(file), "--dtype", dtype)
    torch.manual_seed(1)
    with torch.device(device):
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
            "device": device,
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
    parser = arguments_of(__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="the one that our program was built for")
    parser.add_argument("--dtype", choices=DTYPES, help="only this dtype")
    args = parser.parse_args()
    dtypes = [args.dtype] if args.dtype else ["bf16"] if args.device == "cuda" else list(DTYPES)
    rows = [
        row
        for name, file in models(args.device, args.only)
        for dtype in dtypes
        for row in measure(args.program, args.device, name, file, dtype, args.rounds)
    ]
    args.out.mkdir(parents=True, exist_ok=True)
    parts = {}
    # The parts are those of the CPU.
    for dtype in dtypes if args.device == "cpu" else []:
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
