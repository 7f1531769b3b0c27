"""Times generation beside transformers in alternation, and reports medians.

Both use SmolLM2-135M's dimensions, random weights, f32, temperature 1 over the whole vocabulary, and completions of fixed length.
The side of candle-grpo is a process that reads one case per line and prints seconds. Writes
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
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

torch.set_num_threads(2)

# Prompts, completions per prompt, prompt tokens, new tokens.
CASES = [(1, 1, 128, 64), (2, 8, 128, 64), (8, 8, 128, 64)]


def smollm2_135m_config():
    return LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, rms_norm_eps=1e-5, rope_theta=100000, max_position_embeddings=8192,
        tie_word_embeddings=True, bos_token_id=None, eos_token_id=None, pad_token_id=0, dtype="float32",
    )


def smollm2_135m():
    torch.manual_seed(1)
    return LlamaForCausalLM(smollm2_135m_config()).eval()


def transformers_run(model, prompts, generations, prompt_tokens, new_tokens):
    ids = torch.randint(1, 49152, (prompts, prompt_tokens))
    config = GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, max_new_tokens=new_tokens, min_new_tokens=new_tokens,
        num_return_sequences=generations, pad_token_id=0, eos_token_id=None, bos_token_id=None,
    )
    start = time.perf_counter()
    tokens = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
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


def arguments(description):
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("program", help="our program, target/release/generation")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("target/bench"))
    return parser.parse_args()


def main():
    args = arguments(__doc__)
    ours, model = Side(args.program), smollm2_135m()
    rows = []
    for case in CASES:
        prompts, generations, prompt_tokens, new_tokens = case
        ours.run(prompts, generations, prompt_tokens, 2)
        transformers_run(model, prompts, generations, prompt_tokens, 2)
        pairs = [(ours.run(*case), transformers_run(model, *case)) for _ in range(args.rounds)]
        tokens = prompts * generations * new_tokens
        row = {
            "prompts": prompts,
            "num_generations": generations,
            "prompt_tokens": prompt_tokens,
            "new_tokens": new_tokens,
            "ours_tokens_s": tokens / statistics.median(a for a, _ in pairs),
            "transformers_tokens_s": tokens / statistics.median(b for _, b in pairs),
            "ratio": statistics.median(b / a for a, b in pairs),
        }
        rows.append(row)
        print(f"{prompts} x {generations}: ours {row['ours_tokens_s']:.1f} tokens/s, transformers "
              f"{row['transformers_tokens_s']:.1f}, ratio {row['ratio']:.2f}", flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    parts = subprocess.run([args.program, "--parts"], check=True, capture_output=True, text=True)
    report = {"generation": rows, "parts": json.loads(parts.stdout)}
    (args.out / "generation.json").write_text(json.dumps(report, indent=2) + "\n")
    lines = ["| prompts x completions | ours tokens/s | transformers tokens/s | ratio |", "| --- | ---: | ---: | ---: |"]
    lines += [
        f"| {r['prompts']} x {r['num_generations']} | {r['ours_tokens_s']:.1f} | {r['transformers_tokens_s']:.1f} | {r['ratio']:.2f} |"
        for r in rows
    ]
    (args.out / "generation.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
