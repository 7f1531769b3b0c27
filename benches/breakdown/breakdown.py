"""Divides the time of training steps and of generation among their parts.

Samples the stacks of a process with Linux's `perf` while it works. A sample belongs to the part of its innermost function that
the list below names. Time without a sample is that of an idle core, so the parts add up to the wall time. Writes breakdown.json
and breakdown.md. Run it with benches/breakdown/run, which compiles the programs with frame pointers.
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

OTHER = "other"
IDLE = "waiting for the other core"

# The parts of a program. The innermost function of a stack that matches one decides.
PARTS = [
    ("fresh memory", r"page_fault|clear_page|handle_mm_fault|madvise|munmap|mmap"),
    (IDLE, r"sched_yield|futex|find_work|BarrierGuard|crossbeam_(epoch|deque)|rayon_core::sleep"),
    ("products", r"cpu::(matmul|panel|tiles|amx|linear_rows|word)|gemm|add_matmul"),
    ("softmax of the vocabulary", r"cpu::(linear_log_prob|log_prob)"),
    ("draws", r"draw_tokens|cpu::(distribution|token_filters)"),
    ("pages of keys and values", r"paged_cache|KeyValuePages|WriteRows|PagedBatch"),
    ("attention", r"cpu::(attention|paged_attention)"),
    ("delta rule and convolution", r"cpu::(gated_delta_rule|delta_states|causal_conv)|delta_gates"),
    ("norms", r"rms_norm"),
    ("rotary embedding", r"kernels::rope|cpu::rope"),
    ("gates", r"swiglu|sigmoid"),
    ("embedding", r"cpu::embedding"),
    ("sums", r"kernels::add|cpu::add|GradSink"),
]
# Functions that many parts call. They decide where no function of the stack is of a part.
SHARED = [
    ("copies", r"memmove|memcpy|memset|copy_strided|copy2d|index_select|IndexSelect"),
    ("allocation", r"\bmi_|_mi_|malloc|cfree|_int_free"),
    ("completions, and the order of operators", r"candle_grpo_train|candle_grpo_nn|candle_core"),
    (IDLE, r"wait_until|ThreadBuilder"),
]
TIERS = [[(name, re.compile(pattern)) for name, pattern in tier] for tier in (PARTS, SHARED)]


@dataclass
class Case:
    name: str
    program: str
    arguments: list
    # A line of the program's input.
    line: str
    # Lines that are measured.
    repeats: int


def cases(dtype):
    yield Case(f"training, 8 x 128 tokens, {dtype}", "training-system", ["--serve", "--dtype", dtype], "", 3)
    for prompts, generations, repeats in ((1, 1, 6), (2, 8, 3), (8, 8, 3), (8, 32, 2)):
        line = f"{prompts}\t{generations}\t128\t64"
        yield Case(f"generation, {prompts} x {generations}, {dtype}", "generation", ["--dtype", dtype], line, repeats)


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


def measure(case, programs, details):
    """The wall time of a line in ms, and the share of each part in the time of all cores."""
    command = [programs / case.program, *case.arguments]
    # The program grpo keeps freed memory, too.
    environment = {**os.environ, "MIMALLOC_PURGE_DELAY": "-1"}
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)

    def run():
        process.stdin.write(case.line + "\n")
        process.stdin.flush()
        if not process.stdout.readline():
            sys.exit(f"{command} ended")

    run()
    with tempfile.TemporaryDirectory() as folder:
        data = f"{folder}/perf.data"
        record = ["perf", "record", "-q", "-F", str(FREQUENCY), "-e", "cpu-clock", "-g", "-p", str(process.pid), "-o", data]
        perf = subprocess.Popen(record)
        time.sleep(1)
        seconds = []
        for _ in range(case.repeats):
            start = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - start)
        perf.send_signal(signal.SIGINT)
        perf.wait()
        counts = collections.Counter()
        unknown = collections.Counter()
        for frames in stacks(data):
            name = part(frames)
            counts[name] += 1
            if name == OTHER:
                unknown[" < ".join(frames[:4])] += 1
    process.stdin.close()
    process.wait()
    total = sum(seconds) * CORES * FREQUENCY
    counts[IDLE] += max(0, total - sum(counts.values()))
    if details:
        for stack, count in unknown.most_common(12):
            print(f"  {100 * count / total:5.2f} %  {stack}", file=sys.stderr)
    return statistics.mean(seconds) * 1e3, {name: count / total for name, count in counts.most_common()}


def table(rows):
    """The parts of all cases, in milliseconds."""
    names = [name for name, _ in PARTS + SHARED[:-1] if any(name in row["shares"] for row in rows)] + [OTHER]
    lines = ["| ms | " + " | ".join(row["case"] for row in rows) + " |", "| --- |" + " ---: |" * len(rows)]
    for name in names:
        times = [row["ms"] * row["shares"].get(name, 0) for row in rows]
        lines.append(f"| {name} | " + " | ".join(f"{ms:.1f}" if ms < 100 else f"{ms:.0f}" for ms in times) + " |")
    lines.append("| wall time | " + " | ".join(f"{row['ms']:.0f}" for row in rows) + " |")
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("programs", type=Path, help="the folder of the programs, with frame pointers")
    parser.add_argument("--only", default="", help="the cases whose name has this text")
    parser.add_argument("--details", action="store_true", help="print the stacks that belong to no part")
    arguments = parser.parse_args()
    rows = []
    text = ""
    for dtype in ("f32", "bf16"):
        group = []
        for case in cases(dtype):
            if arguments.only in case.name:
                print(case.name, file=sys.stderr)
                ms, shares = measure(case, arguments.programs, arguments.details)
                group.append({"case": case.name, "ms": ms, "shares": shares})
        if group:
            text += table(group) + "\n"
        rows += group
    folder = Path("target/bench")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "breakdown.json").write_text(json.dumps(rows, indent=1) + "\n")
    (folder / "breakdown.md").write_text(text)
    print(text, end="")


if __name__ == "__main__":
    main()
