"""Divides the time of training steps and of generation by SmolLM2-135M among their parts.

Samples the stacks of a process with Linux's `perf` while it works. A sample belongs to the part of its innermost function that
the lists below name. The time of an idle core is what the system did not count as processor time of the process. So the sum of the
parts is 100 % only as far as the samples agree with the system's count. Writes breakdown.json and breakdown.md. Run it with
benches/breakdown/run, which compiles the programs with frame pointers.
"""

import argparse
import collections
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

# Samples a second for each core. Not a divisor of the rates of the system's timers.
FREQUENCY = 997
CORES = os.cpu_count()

MEMORY = "allocation and fresh memory"
SEARCHING = "a core looks for work"
IDLE = "a core sleeps"
OTHER = "other"

# The innermost function of a stack that matches a part decides.
PARTS = [
    (MEMORY, r"page_fault|clear_page|handle_mm_fault|madvise|munmap|mmap"),
    (SEARCHING, r"sched_yield|futex|find_work|BarrierGuard|crossbeam_(epoch|deque)|rayon_core::sleep"),
    ("products", r"cpu::(matmul|matrix|panel|row_product|tiles|transpose|amx|word)|ops::linear_rows::|gemm|add_matmul"),
    ("pages of keys and values", r"paged_cache|KeyValuePages|WriteRows|PagedBatch"),
    ("attention", r"ops::(attention|paged_attention)::cpu"),
    ("norms, rotary embedding, gates, sums, embedding", r"ops::(rms_norm|rope|swiglu|sigmoid|add|embedding)|GradSink"),
    ("softmax of the vocabulary", r"ops::(linear_log_prob|log_prob)::cpu"),
    ("draws", r"draw_tokens"),
]
# Functions that many parts call. They decide where no function of the stack is of a part.
SHARED = [
    ("copies", r"memmove|memcpy|memset|copy_strided|copy2d|index_select|IndexSelect"),
    (MEMORY, r"\bmi_|_mi_|malloc|cfree|_int_free"),
    ("completions, and the order of operators", r"candle_grpo_train|candle_grpo_nn|candle_core"),
    (SEARCHING, r"wait_until|ThreadBuilder"),
]
TIERS = [[(name, re.compile(pattern)) for name, pattern in tier] for tier in (PARTS, SHARED)]


@dataclass
class Case:
    name: str
    command: list
    # A line of the program's input.
    line: str
    # Lines that are measured.
    repeats: int


def cases(programs):
    for dtype in ("f32", "bf16"):
        yield Case(f"training {dtype}", [programs / "training-system", "--serve", "--dtype", dtype], "", 3)
    for dtype in ("f32", "bf16"):
        for prompts, generations, repeats in ((1, 1, 6), (2, 8, 3), (8, 8, 3), (8, 32, 2)):
            line = f"{prompts}\t{generations}\t128\t64"
            yield Case(f"{prompts * generations} {dtype}", [programs / "generation", "--dtype", dtype], line, repeats)


def part(frames):
    """The part of a stack, whose innermost function is the first frame."""
    for tier in TIERS:
        for frame in frames:
            for name, pattern in tier:
                if pattern.search(frame):
                    return name
    return OTHER


def stacks(data):
    """The stacks of a recording."""
    script = subprocess.run(
        ["perf", "script", "-i", data, "-F", "ip,sym", "--no-inline"], capture_output=True, text=True, check=True
    )
    for event in script.stdout.split("\n\n"):
        frames = [line.split(maxsplit=1)[-1] for line in event.splitlines() if line.strip()]
        if frames:
            yield frames


def processor_seconds(process):
    """The time that the cores have spent on a process, by the system's count."""
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    user, system = fields[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def measure(case, details):
    """The wall time of a line in ms, and the percentage of each part in the time of all cores."""
    process = subprocess.Popen(case.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run():
        process.stdin.write(case.line + "\n")
        process.stdin.flush()
        if not process.stdout.readline():
            sys.exit(f"{case.command} ended")

    run()
    with tempfile.TemporaryDirectory() as folder:
        data = f"{folder}/perf.data"
        record = ["perf", "record", "-q", "-F", str(FREQUENCY), "-e", "cpu-clock", "-g", "-p", str(process.pid), "-o", data]
        perf = subprocess.Popen(record)
        # Until it records.
        time.sleep(1)
        busy = -processor_seconds(process)
        seconds = []
        for _ in range(case.repeats):
            start = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - start)
        busy += processor_seconds(process)
        perf.send_signal(signal.SIGINT)
        perf.wait()
        found = [(part(frames), frames) for frames in stacks(data)]
    process.stdin.close()
    process.wait()
    total = sum(seconds) * CORES
    counts = collections.Counter(name for name, _ in found)
    shares = {name: 100 * count / FREQUENCY / total for name, count in counts.items()}
    shares[IDLE] = 100 * (total - busy) / total
    if details:
        unknown = collections.Counter(" < ".join(frames[:4]) for name, frames in found if name == OTHER)
        for stack, count in unknown.most_common(12):
            print(f"  {100 * count / FREQUENCY / total:5.2f} %  {stack}", file=sys.stderr)
    return {"case": case.name, "ms": statistics.mean(seconds) * 1e3, "shares": shares}


def table(rows):
    names = [name for name, _ in PARTS[2:] + SHARED[:-1]] + [OTHER, SEARCHING, IDLE]
    lines = ["| % of the wall time | " + " | ".join(row["case"] for row in rows) + " |", "| --- |" + " ---: |" * len(rows)]
    for name in names:
        lines.append(f"| {name} | " + " | ".join(f"{row['shares'].get(name, 0):.1f}" for row in rows) + " |")
    lines.append("| sum | " + " | ".join(f"{sum(row['shares'].values()):.1f}" for row in rows) + " |")
    lines.append("| wall time, ms | " + " | ".join(f"{row['ms']:,.0f}" for row in rows) + " |")
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("programs", type=Path, help="the folder of the programs, with frame pointers")
    parser.add_argument("--only", default="", help="the cases whose name has this text")
    parser.add_argument("--details", action="store_true", help="print the stacks that belong to no part")
    arguments = parser.parse_args()
    rows = []
    for case in cases(arguments.programs):
        if arguments.only in case.name:
            print(case.name, file=sys.stderr)
            rows.append(measure(case, arguments.details))
    folder = Path("target/bench")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "breakdown.json").write_text(json.dumps(rows, indent=1) + "\n")
    (folder / "breakdown.md").write_text(table(rows))
    print(table(rows), end="")


if __name__ == "__main__":
    main()
