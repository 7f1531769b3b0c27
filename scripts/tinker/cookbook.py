"""Runs two recipes of Tinker's cookbook, unchanged, against `grpo serve --tinker`: python cookbook.py MODEL FOLDER.

The data sets are a few rows in memory, and the renderer is one for ChatML, the format of the model.
"""

import json
import sys
from pathlib import Path

import datasets
from tinker_cookbook import model_info
from tinker_cookbook.recipes import rl_loop, sl_loop


def conversations():
    pairs = [("Name a color.", "Blue."), ("Name a fruit.", "Apple."), ("Name an animal.", "Dog."), ("Name a tree.", "Oak.")]
    rows = [[{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in pairs * 4]
    return {"messages": rows}


def questions():
    sums = [(a, b) for a in range(1, 5) for b in range(1, 5)]
    return {
        "question": [f"What is {a} + {b}?" for a, b in sums],
        "answer": [f"{a} + {b} = {a + b}\n#### {a + b}" for a, b in sums],
    }


def load_dataset(name, *_):
    rows = questions() if "gsm8k" in name else conversations()
    return datasets.DatasetDict(train=datasets.Dataset.from_dict(rows))


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def main(model, folder):
    datasets.load_dataset = load_dataset
    model_info.get_recommended_renderer_name = lambda _: "qwen3_instruct"
    base = {"model_name": model, "lora_rank": 8, "save_every": 2, "ttl_seconds": None}
    sl = folder / "sl"
    sl_loop.main(sl_loop.Config(log_path=str(sl), batch_size=4, learning_rate=1e-3, max_length=64, **base))
    losses = [x["train_mean_nll"] for x in metrics(sl)]
    assert losses[-1] < losses[0], losses
    rl = folder / "rl"
    rl_loop.main(rl_loop.Config(log_path=str(rl), batch_size=2, group_size=4, max_tokens=24, max_steps=2, **base))
    assert all("reward/total" in x for x in metrics(rl))
    print("cookbook: passed")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
