"""Times our operators beside PyTorch and Liger-Kernel: one run of each in turn, medians of both.

Our side is a child process that runs a case once for each line it is sent and answers with its milliseconds and its peak of
memory. Peers run here. Writes target/bench/peers.json and peers.md.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import peers


class Ours:
    """Our operators, in a process of their own."""

    def __init__(self, program):
        self.process = subprocess.Popen(
            [program, "--serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, case):
        fields = [case.op, case.shape, case.dtype, case.direction]
        self.process.stdin.write("\t".join(fields) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            sys.exit(f"our program ended at {fields}")
        return float(answer.split("\t")[0])


def milliseconds(run):
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1e3


def measure(ours, case, rounds):
    run = case.prepare()
    run()
    ours.run(case)
    pairs = [(ours.run(case), milliseconds(run)) for _ in range(rounds)]
    return {
        "op": case.op,
        "shape": case.shape,
        "dtype": case.dtype,
        "device": "cpu",
        "peer": case.peer,
        "ours_ms": statistics.median(a for a, _ in pairs),
        "peer_ms": statistics.median(b for _, b in pairs),
        "ratio": statistics.median(a / b for a, b in pairs),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("program", help="our benchmark program")
    parser.add_argument("--only", default="", help="only operators whose name contains this")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, default=Path("target/bench"))
    args = parser.parse_args()

    ours = Ours(args.program)
    rows = []
    for case in peers.cases():
        if args.only not in case.op:
            continue
        row = measure(ours, case, args.rounds)
        rows.append(row)
        print(f"{row['op']} {row['shape']} {row['dtype']}: ours {row['ours_ms']:.1f} ms, "
              f"{row['peer']} {row['peer_ms']:.1f} ms, ratio {row['ratio']:.3f}", flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "peers.json").write_text(json.dumps(rows, indent=2) + "\n")
    lines = ["| operator | shape | dtype | peer | ours ms | peer ms | ratio |", "| --- | --- | --- | --- | ---: | ---: | ---: |"]
    lines += [
        f"| {r['op']} | {r['shape']} | {r['dtype']} | {r['peer']} | {r['ours_ms']:.1f} | {r['peer_ms']:.1f} | {r['ratio']:.3f} |"
        for r in rows
    ]
    (args.out / "peers.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
