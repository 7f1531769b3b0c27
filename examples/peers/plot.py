"""Plots the runs of compare.py: curves.svg and table.md in target/peers."""

import json
import re
import statistics
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

RUNS = Path("target/peers/runs")
COLORS = {"candle-grpo": "#2563eb", "TRL": "#d97706"}
# The first steps of a short run warm up caches and threads.
UNTIMED = 2


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def runs(folder, file):
    """The lines of `file` of each run in `folder`, by side and number."""
    found = {side: {} for side in COLORS}
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
            ax.plot(steps, curves[-1], color=COLORS[side], alpha=0.35, linewidth=1)
        mean = [statistics.fmean(at_step) for at_step in zip(*curves, strict=True)]
        ax.plot(steps, mean, color=COLORS[side], linewidth=2.2, label=f"{side}, mean of {len(curves)} seeds")
    ax.set(title=title, xlabel="step", ylim=(0, None))
    ax.yaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1.0, decimals=0))
    ax.grid(color="#e5e7eb")
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)


def curves(evaluations, metrics, out):
    # The file depends only on the runs.
    plt.rcParams.update({"svg.hashsalt": "peers", "svg.fonttype": "none", "font.family": "sans-serif"})
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), facecolor="white", layout="constrained")
    draw(left, evaluations, "right on 1,000 held-out problems", lambda values: values)
    draw(right, metrics, "right in training, mean of the last 10 steps", smooth)
    left.legend(loc="lower right", frameon=False)
    figure.savefig(out, metadata={"Date": None})


def share(x):
    return f"{100 * x:.1f}%"


def markdown(rows):
    rows = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n"


def shares(evaluations, metrics):
    """Returns a table of the shares of correct answers by seed, and their means."""
    rows = [["", "", *[f"seed {seed}" for seed in next(iter(evaluations.values()))], "mean"]]
    for name, found, value in [
        ("held out, before", evaluations, lambda run: run[0]["reward_mean"]),
        ("held out, after", evaluations, lambda run: run[-1]["reward_mean"]),
        ("in training, last 20 steps", metrics, lambda run: statistics.fmean(line["reward_mean"] for line in run[-20:])),
    ]:
        for side, by_seed in found.items():
            values = [value(run) for run in by_seed.values()]
            rows.append([name, side, *map(share, values), share(statistics.fmean(values))])
    return markdown(rows)


def clock(metrics):
    """Returns a table of the median seconds of a step by round, and the ratios of TRL's time to ours."""
    medians = {
        side: [statistics.median(seconds(line) for line in run[UNTIMED:]) for run in by_round.values()]
        for side, by_round in metrics.items()
    }
    ratios = [theirs / ours for ours, theirs in zip(medians["candle-grpo"], medians["TRL"], strict=True)]
    rows = [["seconds a step", *[f"round {number}" for number in metrics["TRL"]], "median"]]
    for name, values, form in [*[(side, values, ".3f") for side, values in medians.items()], ("TRL / candle-grpo", ratios, ".2f")]:
        rows.append([name, *[format(x, form) for x in values], format(statistics.median(values), form)])
    return markdown(rows)


def main():
    evaluations, metrics = runs(RUNS, "evaluations.jsonl"), runs(RUNS, "metrics.jsonl")
    curves(evaluations, metrics, RUNS.parent / "curves.svg")
    text = shares(evaluations, metrics) + "\n" + clock(runs(RUNS / "clock", "metrics.jsonl"))
    (RUNS.parent / "table.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
