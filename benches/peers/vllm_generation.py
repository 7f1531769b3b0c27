"""Times generation beside vLLM on the CPU in alternation, and reports medians.

Runs in the environment of `scripts/vllm install`. Prompts and lengths are those of generation.py, and the model has SmolLM2-135M's
dimensions. Both draw in f32 and in bf16, each in a process of its own, vLLM with its log-probs after temperature and filters. The
completions of a prompt are one request, so that it computes the prompt once. Each run has new prompts, because vLLM keeps the keys
and values of earlier ones. Writes target/bench/vllm.json and vllm.md.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

from generation import CASES, DTYPES as OURS, SMOLLM2_135M, Side, arguments_of
from models import config

DTYPES = ["float32", "bfloat16"]


def worker(dtype):
    """Reads one case per line, as the side of candle-grpo, and prints seconds."""
    os.environ.update(
        VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND="nobind", VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_OFFLINE="1",
        VLLM_NO_USAGE_STATS="1", DO_NOT_TRACK="1",
    )
    # Only the seconds go to the standard output.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import torch
    from vllm import LLM, SamplingParams

    with tempfile.TemporaryDirectory() as folder:
        config(SMOLLM2_135M).save_pretrained(folder)
        model = LLM(
            folder, load_format="dummy", skip_tokenizer_init=True, dtype=dtype, max_model_len=512, max_num_seqs=64, block_size=32,
            enforce_eager=True, logprobs_mode="processed_logprobs", seed=1,
        )
    torch.manual_seed(1)
    for line in sys.stdin:
        prompts, generations, prompt_tokens, new_tokens = map(int, line.split())
        ids = torch.randint(1, 49152, (prompts, prompt_tokens)).tolist()
        params = SamplingParams(
            n=generations, temperature=1.0, top_p=1.0, top_k=0, max_tokens=new_tokens, ignore_eos=True, logprobs=0, detokenize=False,
        )
        start = time.perf_counter()
        answers = model.generate([{"prompt_token_ids": prompt} for prompt in ids], params, use_tqdm=False)
        seconds = time.perf_counter() - start
        lengths = {len(completion.token_ids) for answer in answers for completion in answer.outputs}
        assert lengths == {new_tokens}, lengths
        print(seconds, file=out, flush=True)


def main():
    args = arguments_of(__doc__).parse_args()
    sides = {f"candle-grpo {dtype}": Side(args.program, "--dtype", dtype) for dtype in OURS}
    for dtype in DTYPES:
        sides[f"vLLM {dtype}"] = Side(sys.executable, __file__, "--worker", dtype)
    rows = []
    for case in CASES:
        prompts, generations, prompt_tokens, new_tokens = case
        for side in sides.values():
            side.run(prompts, generations, prompt_tokens, 2)
        rounds = [{name: side.run(*case) for name, side in sides.items()} for _ in range(args.rounds)]
        tokens = prompts * generations * new_tokens
        row = {name: tokens / statistics.median(seconds[name] for seconds in rounds) for name in sides}
        rows.append({"prompts": prompts, "num_generations": generations, "prompt_tokens": prompt_tokens, "new_tokens": new_tokens,
                     "tokens_s": row})
        print(f"{prompts} x {generations}: " + ", ".join(f"{name} {speed:.1f} tokens/s" for name, speed in row.items()), flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "vllm.json").write_text(json.dumps(rows, indent=2) + "\n")
    lines = ["| prompts x completions | " + " | ".join(f"{name} tokens/s" for name in sides) + " |",
             "| --- |" + " ---: |" * len(sides)]
    lines += [
        f"| {r['prompts']} x {r['num_generations']} | " + " | ".join(f"{speed:.1f}" for speed in r["tokens_s"].values()) + " |"
        for r in rows
    ]
    (args.out / "vllm.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(sys.argv[2])
    else:
        main()
