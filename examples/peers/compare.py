"""Trains the same policy with candle-grpo and with TRL, and compares the runs: target/peers/curves.svg and table.md.

Makes complete runs for the curves first, then alternating short runs without evaluations for the times. Keeps existing runs.
"""

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

import yaml

HERE = Path(__file__).parent
RUNS = Path("target/peers/runs")


def command(side, program, config):
    if side == "candle-grpo":
        return [program, "train", config]
    return [sys.executable, HERE / "trl_grpo.py", config]


def train(side, program, name, settings, changes):
    """Makes the run `name` unless it exists."""
    folder = RUNS / name
    if folder.with_suffix(".done").exists():
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    config = folder.with_suffix(".yaml")
    config.write_text(yaml.safe_dump({**settings, **changes, "run_dir": str(folder)}, sort_keys=False))
    print(name, flush=True)
    with folder.with_suffix(".log").open("w") as log:
        code = subprocess.run(command(side, program, config), stdout=log, stderr=log).returncode
    if code != 0:
        sys.exit(f"{name}: ended with {code}, see {folder.with_suffix('.log')}")
    folder.with_suffix(".done").touch()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("program", help="grpo")
    parser.add_argument("--seeds", type=int, default=3, help="whole runs of each side")
    parser.add_argument("--rounds", type=int, default=5, help="short runs of each side")
    parser.add_argument("--steps", type=int, default=20, help="steps of a short run")
    parser.add_argument("--sides", nargs="+", default=["candle-grpo", "TRL"], help="for one side alone")
    args = parser.parse_args()
    settings = yaml.safe_load((HERE / "run.yaml").read_text())
    for seed in range(args.seeds):
        for side in args.sides:
            train(side, args.program, f"{side}-{seed}", settings, {"seed": seed})
    for round in range(args.rounds):
        changes = {"seed": round, "max_steps": args.steps, "evaluation": {"every_steps": None}}
        for side in args.sides:
            train(side, args.program, f"clock/{side}-{round}", settings, changes)


if __name__ == "__main__":
    main()
