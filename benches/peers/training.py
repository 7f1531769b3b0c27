"""Times a training step of each model of benches/models beside PyTorch with transformers.

Each side is a separate process that runs one step per input line: forward and backward of some sequences, with the log-prob of the
next token at every position. The sides alternate. In bf16 both have weights and gradients in f32: ours computes with copies in
bf16, and PyTorch under autocast. Reports medians and memory: the peak resident memory of each process on the CPU, and the peak of a
step beyond the weights on a GPU. Writes training.json and training.md.

On a GPU the models are those of benches/models/cuda, and the second peer is transformers with Liger-Kernel's operators, whose loss
keeps no logits.
"""

import argparse
import json
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from models import config, models


@dataclass
class Case:
    dtype: str
    peer: str
    sequences: int
    length: int

    def tokens(self):
        return self.sequences * self.length


CASES = {
    "cpu": [Case(dtype, "transformers", 8, 128) for dtype in ("f32", "bf16")],
    "cuda": [Case("bf16", peer, 8, 1024) for peer in ("transformers", "transformers with Liger-Kernel")],
}


def worker(device, name, case):
    """Runs the side of PyTorch."""
    import time

    import torch
    from transformers import AutoModelForCausalLM

    on_gpu = device == "cuda"
    torch.set_num_threads(2)
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config(name)).float()
        ids = torch.randint(model.config.vocab_size, (case.sequences, case.length))
    with_liger = "Liger" in case.peer
    if with_liger:
        from liger_kernel.transformers import _apply_liger_kernel_to_instance

        _apply_liger_kernel_to_instance(model=model)
        # Liger-Kernel computes the fused loss in this mode only. The models have no dropout.
        model.train()

    def loss():
        if with_liger:
            return model(input_ids=ids, labels=ids, use_cache=False).loss
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        return -torch.log_softmax(logits, -1).gather(-1, ids[:, 1:, None]).mean()

    for _ in sys.stdin:
        model.zero_grad(set_to_none=True)
        before = 0
        if on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        start = time.perf_counter()
        with torch.autocast(device, torch.bfloat16, enabled=case.dtype == "bf16"):
            value = loss()
        value.backward()
        if on_gpu:
            torch.cuda.synchronize()
        ms = (time.perf_counter() - start) * 1e3
        mib = (torch.cuda.max_memory_allocated() - before) / 2**20 if on_gpu else float("nan")
        print(f"{ms}\t{mib}", flush=True)


class Side:
    def __init__(self, command):
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def step(self):
        """Returns the milliseconds of a step, and its peak memory beyond the weights in MiB."""
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            sys.exit(f"{self.process.args} ended")
        ms, mib = answer.split("\t")
        return float(ms), float(mib)

    def resident_mib(self):
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return next(int(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith("VmHWM"))

    def end(self):
        self.process.stdin.close()
        self.process.wait()


def measure(program, device, file, name, case, rounds):
    ours = Side([program, "--serve", "--model", str(file), "--dtype", case.dtype,
                 "--sequences", str(case.sequences), "--length", str(case.length)])
    theirs = Side([sys.executable, __file__, "--device", device, "--worker", name, json.dumps(vars(case))])
    ours.step(), theirs.step()
    pairs = [(ours.step(), theirs.step()) for _ in range(rounds)]
    ours_ms, peer_ms = ([pair[i][0] for pair in pairs] for i in (0, 1))
    if device == "cpu":
        ours_mib, peer_mib = ours.resident_mib(), theirs.resident_mib()
    else:
        ours_mib, peer_mib = (max(pair[i][1] for pair in pairs) for i in (0, 1))
    row = {
        "op": "training_step",
        "shape": f"{case.sequences} x {case.length} tokens, {name}",
        "dtype": case.dtype,
        "device": device,
        "peer": case.peer,
        "ours_ms": statistics.median(ours_ms),
        "peer_ms": statistics.median(peer_ms),
        "ratio": statistics.median(a / b for a, b in zip(ours_ms, peer_ms)),
        "ours_tokens_per_s": case.tokens() / statistics.median(ours_ms) * 1e3,
        "peer_tokens_per_s": case.tokens() / statistics.median(peer_ms) * 1e3,
        "ours_mib": ours_mib,
        "peer_mib": peer_mib,
    }
    for side in (ours, theirs):
        side.end()
    return row


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("program", nargs="?", help="our program, training-system or training-mimalloc")
    parser.add_argument("--device", choices=CASES, default="cpu", help="the one that our program was built for")
    parser.add_argument("--only", default="", help="only models whose name contains this")
    parser.add_argument("--dtype", choices=["f32", "bf16"], help="only this dtype")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("target/bench"))
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        name, case = args.worker
        return worker(args.device, name, Case(**json.loads(case)))
    if not args.program:
        parser.error("program: missing")

    rows = []
    for name, file in models(args.device, args.only):
        for case in CASES[args.device]:
            if args.dtype not in (None, case.dtype):
                continue
            rows.append(measure(args.program, args.device, file, name, case, args.rounds))
            print(json.dumps(rows[-1], indent=2), flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "training.json").write_text(json.dumps(rows, indent=2) + "\n")
    lines = ["| model and tokens | dtype | peer | ours tokens/s | peer tokens/s | time, ours / theirs | ours MiB | peer MiB |",
             "| --- | --- | --- | ---: | ---: | ---: | ---: | ---: |"]
    lines += [
        f"| {r['shape']} | {r['dtype']} | {r['peer']} | {r['ours_tokens_per_s']:.0f} | {r['peer_tokens_per_s']:.0f} | "
        f"{r['ratio']:.2f} | {r['ours_mib']:.0f} | {r['peer_mib']:.0f} |"
        for r in rows
    ]
    (args.out / "training.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
