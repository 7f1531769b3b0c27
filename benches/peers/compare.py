"""Times the operators beside PyTorch and Liger-Kernel in alternation, and reports medians.

Each side is a separate process, which runs a case once per input line. On the CPU, memory is measured in separate processes, one per
case. On a GPU the sides count what they allocate, so two processes run all cases. Writes peers.json and peers.md.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import peers

# Above this size, glibc allocates blocks from the system and returns them, so that the resident memory is the used memory.
# Otherwise glibc keeps freed blocks, and the next run seems to need no memory.
FRESH_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "65536"}


class Side:
    """A process that runs cases."""

    def __init__(self, command, **environment):
        self.command = command
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | environment
        )

    def run(self, case):
        """Returns the milliseconds of a run, and the memory that the process reports, in MiB."""
        self.process.stdin.write(case.line() + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            sys.exit(f"{self.command} ended at {case.line()}")
        ms, mib = answer.split("\t")
        return float(ms), float(mib)

    def resident_mib(self, field):
        """Returns VmRSS, the resident memory of the process, or VmHWM, its peak."""
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1]) / 1024
        raise ValueError(field)

    def end(self):
        self.process.stdin.close()
        self.process.wait()


def peak_mib(command, case):
    """Measures the memory of one run beyond the inputs on the CPU, after a warm-up run has loaded code and created threads."""
    side = Side(command, **FRESH_MEMORY)
    side.run(case)
    # 5 resets the peak to the current value.
    Path(f"/proc/{side.process.pid}/clear_refs").write_text("5")
    before = side.resident_mib("VmRSS")
    side.run(case)
    peak = side.resident_mib("VmHWM") - before
    side.end()
    return peak


def measure_on_cpu(commands, case, rounds):
    ours_mib, peer_mib = (peak_mib(command, case) for command in commands)
    sides = [Side(command) for command in commands]
    row = measure(sides, case, rounds, "cpu")
    for side in sides:
        side.end()
    return row | {"ours_peak_mib": ours_mib, "peer_peak_mib": peer_mib}


def measure(sides, case, rounds, device):
    ours, peer = sides
    for side in sides:
        side.run(case)
    samples = [(ours.run(case), peer.run(case)) for _ in range(rounds)]
    ours_ms, peer_ms = ([pair[i][0] for pair in samples] for i in (0, 1))
    ours_mib, peer_mib = (max(pair[i][1] for pair in samples) for i in (0, 1))
    return {
        "op": case.op,
        "shape": case.shape,
        "dtype": case.dtype,
        "direction": case.direction,
        "device": device,
        "peer": case.peer,
        "ours_ms": statistics.median(ours_ms),
        "peer_ms": statistics.median(peer_ms),
        "ratio": statistics.median(a / b for a, b in zip(ours_ms, peer_ms)),
        "ours_peak_mib": ours_mib,
        "peer_peak_mib": peer_mib,
    }


def verdict(row, case):
    met = row["ratio"] <= case.goal
    memory = f"{row['ours_peak_mib']:.0f} MiB beside {row['peer_peak_mib']:.0f} MiB"
    if case.less_memory:
        met = met and row["ours_peak_mib"] < row["peer_peak_mib"]
        memory += ", must be less"
    return (f"goal {'met' if met else 'MISSED'}: {case.op} {case.shape} {case.dtype}: {row['ratio']:.3f} of the time of "
            f"{case.peer}, at most {case.goal}; {memory}")


TITLES = {
    "op": "operator", "shape": "shape", "dtype": "dtype", "direction": "passes", "device": "device", "peer": "peer", "ours_ms": "ours ms",
    "peer_ms": "peer ms", "ratio": "ratio", "ours_peak_mib": "ours MiB", "peer_peak_mib": "peer MiB",
}
FORMATS = {"ours_ms": ".2f", "peer_ms": ".2f", "ratio": ".3f", "ours_peak_mib": ".0f", "peer_peak_mib": ".0f"}


def table(rows):
    yield "| " + " | ".join(TITLES.values()) + " |"
    yield "| " + " | ".join("---:" if key in FORMATS else "---" for key in TITLES) + " |"
    for row in rows:
        yield "| " + " | ".join(format(row[key], FORMATS.get(key, "")) for key in TITLES) + " |"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("program", help="our benchmark program")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="the one that our program was built for")
    parser.add_argument("--only", default="", help="only operators whose name contains this")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, default=Path("target/bench"))
    args = parser.parse_args()

    commands = [
        [args.program, "--serve"],
        [sys.executable, str(Path(__file__).with_name("peers.py")), args.device],
    ]
    sides = [Side(command) for command in commands] if args.device == "cuda" else []
    rows, verdicts = [], []
    for case in peers.cases(args.device):
        if args.only in case.op:
            row = measure(sides, case, args.rounds, args.device) if sides else measure_on_cpu(commands, case, args.rounds)
            rows.append(row)
            print(list(table([row]))[-1], flush=True)
            if case.goal:
                verdicts.append(verdict(row, case))
    for side in sides:
        side.end()
    print("\n".join(verdicts))
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "peers.json").write_text(json.dumps(rows, indent=2) + "\n")
    (args.out / "peers.md").write_text("\n".join(table(rows)) + "\n")


if __name__ == "__main__":
    main()
