#!/usr/bin/env python3
"""Writes train.jsonl and held_out.jsonl beside this file: sums of two numbers from 10 to 99, with a fixed seed.

No held-out sum is in the training data, in either order of its numbers.
"""

import json
import random
from pathlib import Path

HELD_OUT, TRAIN = 200, 2000

rng = random.Random(0)
pairs = [(a, b) for a in range(10, 100) for b in range(a, 100)]
rng.shuffle(pairs)
held_out, rest = pairs[:HELD_OUT], pairs[HELD_OUT:]
train = rng.sample(rest, TRAIN)

for name, chosen in [("train", train), ("held_out", held_out)]:
    with open(Path(__file__).parent / f"{name}.jsonl", "w") as file:
        for pair in chosen:
            a, b = rng.sample(pair, 2)
            file.write(json.dumps({"a": a, "b": b, "sum": a + b}) + "\n")
