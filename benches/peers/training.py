"""Times a training step of each model of benches/models beside PyTorch with transformers.

Each side is a separate process that runs one step per input line: forward and backward of 8 sequences of 128 tokens, with the
log-prob of the next token at every position. The sides alternate. In bf16 both have weights and gradients in f32: ours computes
with copies in bf16, and PyTorch under autocast. Reports medians and the peak resident memory of each process. Writes training.json
and training.md.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

from models import MODELS, config

SEQUENCES, LENGTH = 8, 128
DTYPES = ["f32", "bf16"]


def worker(name, dtype):
    """Runs the side of PyTorch."""
    import time

    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(2)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config(name)).float()
    ids = torch.randint(model.config.vocab_size, (SEQUENCES, LENGTH))
    for _ in sys.stdin:
        start = time.perf_counter()
        model.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bf16"):
            logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
            log_probs = torch.log_softmax(logits, -1).gather(-1, ids[:, 1:, None])
        (-log_probs.mean()).backward()
        print((time.perf_counter() - start) * 1e3, flush=True)


class Side:
    def __init__(self, command):
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def step(self):
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            sys.exit(f"{self.process.args} ended")
        return float(answer)

    def peak_mib(self):
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return next(int(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith("VmHWM"))


    def end(self):
        self.process.stdin.close()
        self.process.wait()


def measure(program, name, dtype, rounds):
    ours = Side([program, "--serve", "--model", str(MODELS / f"{name}.json"), "--dtype", dtype,
                 "--sequences", str(SEQUENCES), "--length", str(LENGTH)])
    theirs = Side([sys.executable, __file__, "--worker", name, dtype])
    ours.step(), theirs.step()
    pairs = [(ours.step(), theirs.step()) for _ in range(rounds)]
    tokens = SEQUENCES * LENGTH
    row = {
        "op": "training_step",
        "shape": f"{SEQUENCES} x {LENGTH} tokens, {name}",
        "dtype": dtype,
        "device": "cpu",
        "peer": "transformers",
        "ours_ms": statistics.median(a for a, _ in pairs),
        "peer_ms": statistics.median(b for _, b in pairs),
        "ratio": statistics.median(a / b for a, b in pairs),
        "ours_tokens_per_s": tokens / statistics.median(a for a, _ in pairs) * 1e3,
        "peer_tokens_per_s": tokens / statistics.median(b for _, b in pairs) * 1e3,
        "ours_resident_mib": ours.peak_mib(),
        "peer_resident_mib": theirs.peak_mib(),
    }
    for side in (ours, theirs):
        side.end()
    return row


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("program", nargs="?", help="our program, training-system or training-mimalloc")
    parser.add_argument("--only", default="", help="only models whose name contains this")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("target/bench"))
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return worker(*args.worker)
    if not args.program:
        parser.error("program: missing")

    rows = []
    for file in sorted(MODELS.glob("*.json")):
        if args.only in file.stem:
            for dtype in DTYPES:
                rows.append(measure(args.program, file.stem, dtype, args.rounds))
                print(json.dumps(rows[-1], indent=2), flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "training.json").write_text(json.dumps(rows, indent=2) + "\n")
    lines = ["| model | dtype | ours tokens/s | transformers tokens/s | time, ours / theirs | ours MiB | transformers MiB |",
             "| --- | --- | ---: | ---: | ---: | ---: | ---: |"]
    lines += [
        f"| {r['shape'].split(', ')[1]} | {r['dtype']} | {r['ours_tokens_per_s']:.0f} | {r['peer_tokens_per_s']:.0f} | {r['ratio']:.2f} | "
        f"{r['ours_resident_mib']:.0f} | {r['peer_resident_mib']:.0f} |"
        for r in rows
    ]
    (args.out / "training.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
