#!/usr/bin/env python3
"""Writes train.jsonl and held_out.jsonl beside this file: the codes of 16 invented towns, with a fixed seed.

They are in no model's training data. The held-out questions ask for the same codes in other words.
"""

import json
import random
from pathlib import Path

STARTS = "Bel Cor Dal Fen Gar Hol Jan Kel Lor Mar Nor Pel Ral San Tor Var".split()
ENDS = "bury dale field ford gate ham mere port stead ton wick wood".split()
FACTS = 16

rng = random.Random(0)
towns = rng.sample([start + end for start in STARTS for end in ENDS], FACTS)
codes = rng.sample(range(100, 1000), FACTS)

for name, question, start in [
    ("train", "What is the code of {}?", "The code of {} is"),
    ("held_out", "Which code does {} have?", "{} has the code"),
]:
    with open(Path(__file__).parent / f"{name}.jsonl", "w") as file:
        for town, code in zip(towns, codes):
            row = {"town": town, "code": code, "question": question.format(town), "start": start.format(town)}
            file.write(json.dumps(row) + "\n")
