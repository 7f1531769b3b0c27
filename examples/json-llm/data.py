#!/usr/bin/env python3
"""Writes train.jsonl and held_out.jsonl beside this file: a name, an age, and an object of both, with a fixed seed.

No held-out name is in the training data.
"""

import json
import random
from pathlib import Path

HELD_OUT, TRAIN = 200, 1000
NAMES = """
Ada Adam Aisha Alan Alice Amir Ana Andrew Anna Anton Astrid Ben Bianca Boris Bruno Carla Carlos Cecilia Chen Chloe Clara Daniel
David Diana Diego Dora Edward Elena Elias Emil Emma Erik Eva Fatima Felix Fiona Frank Gabriel George Grace Greta Hana Hannah
Harry Hassan Helen Hugo Ida Igor Ines Irene Isaac Ivan Jack Jakob James Jane Javier Joan John Jonas Julia Karim Karl Kate Kenji
Klara Lara Laura Leila Leo Liam Lin Linda Lucas Lucia Magda Marco Maria Mark Marta Max Maya Mei Mia Michael Mila Mina Nadia
Nina Noah Nora Oliver Olga Omar Oscar Pablo Paul Peter Priya Rafael Ravi Rita Robert Rosa Ruth Sam Samira Sara Simon Sofia
Stefan Susan Tariq Teresa Thomas Tom Vera Victor Yara Yuki Zoe
""".split()

rng = random.Random(0)
rng.shuffle(NAMES)
held_out, rest = NAMES[:24], NAMES[24:]

for file_name, names, count in [("train", rest, TRAIN), ("held_out", held_out, HELD_OUT)]:
    people = [(name, age) for name in names for age in range(1, 100)]
    with open(Path(__file__).parent / f"{file_name}.jsonl", "w") as file:
        for name, age in rng.sample(people, count):
            row = {"name": name, "age": age, "person": {"name": name, "age": age}}
            file.write(json.dumps(row) + "\n")
