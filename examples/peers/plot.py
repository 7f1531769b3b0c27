"""Puts the runs of compare.py side by side: curves.svg and table.md in target/peers."""

import json
import re
import statistics
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

RUNS = Path("target/peers/runs")
COLOURS = {"candle-grpo": "#2563eb", "TRL": "#d97706"}
# The first steps of a short run warm up caches and threads.
UNTIMED = 2


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def runs(folder, file):
    """The lines of `file` of each run in `folder`, by side and number."""
    found = {side: {} for side in COLOURS}
    for done in sorted(folder.glob("*.done")):
        side, number = re.fullmatch(r"(.*)-(\d+)\.done", done.name).groups()
        found[side][int(number)] = lines(done.with_suffix("") / file)
    return found


def seconds(line):
    return sum(line["seconds"].values())


def smooth(values, width=10):
    return [statistics.fmean(values[max(0, i + 1 - width) : i + 1]) for i in range(len(values))]


def draw(ax, found, title, values):
    for side, by_seed in found.items():
        curves = []
        for run in by_seed.values():
            curves.append(values([line["reward_mean"] for line in run]))
            steps = [line["step"] for line in run]
            ax.plot(steps, curves[-1], color=COLOURS[side], alpha=0.35, linewidth=1)
        mean = [statistics.fmean(at_step) for at_step in zip(*curves, strict=True)]
        ax.plot(steps, mean, color=COLOURS[side], linewidth=2.2, label=f"{side}, mean of {len(curves)} seeds")
    ax.set(title=title, xlabel="step", ylim=(0, None))
    ax.yaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1.0, decimals=0))
    ax.grid(color="#e5e7eb")
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)


def curves(evaluations, metrics, out):
    # The same runs give the same file.
    plt.rcParams.update({"svg.hashsalt": "peers", "svg.fonttype": "none", "font.family": "sans-serif"})
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), facecolor="white", layout="constrained")
    draw(left, evaluations, "right on 1,000 held-out problems", lambda values: values)
    draw(right, metrics, "right in training, mean of 10 steps", smooth)
    left.legend(loc="lower right", frameon=False)
    figure.savefig(out, metadata={"Date": None})


def table(evaluations, metrics, clocks):
    sides = list(COLOURS)
    rows = [["", *sides], ["---", *["---"] * len(sides)]]
    seeds = evaluations[sides[0]].keys()
    share = lambda x: f"{100 * x:.1f} %"
    for name, value in [
        ("held out, before", lambda side, seed: evaluations[side][seed][0]["reward_mean"]),
        ("held out, after", lambda side, seed: evaluations[side][seed][-1]["reward_mean"]),
        (
            "in training, last 20 steps",
            lambda side, seed: statistics.fmean(line["reward_mean"] for line in metrics[side][seed][-20:]),
        ),
    ]:
        for seed in seeds:
            rows.append([f"{name}, seed {seed}", *[share(value(side, seed)) for side in sides]])
        mean = [statistics.fmean(value(side, seed) for seed in seeds) for side in sides]
        rows.append([f"**{name}, mean**", *[f"**{share(x)}**" for x in mean]])
    medians = {
        side: [statistics.median(seconds(line) for line in run[UNTIMED:]) for run in by_round.values()]
        for side, by_round in clocks.items()
    }
    for number, row in enumerate(zip(*medians.values(), strict=True)):
        rows.append([f"seconds a step, round {number}", *[f"{x:.3f}" for x in row]])
    ratio = statistics.median(b / a for a, b in zip(*medians.values(), strict=True))
    text = "\n".join("| " + " | ".join(row) + " |" for row in rows)
    return f"{text}\n\nTRL takes {ratio:.2f} times as long a step: median of {len(clocks[sides[0]])} rounds.\n"


def main():
    evaluations, metrics = runs(RUNS, "evaluations.jsonl"), runs(RUNS, "metrics.jsonl")
    curves(evaluations, metrics, RUNS.parent / "curves.svg")
    text = table(evaluations, metrics, runs(RUNS / "clock", "metrics.jsonl"))
    (RUNS.parent / "table.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
