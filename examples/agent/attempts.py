"""An agent that plans, makes two attempts after its plan, and reports the better one."""

import json
import os
import re
import sys
import urllib.request

from openai import OpenAI

client = OpenAI()  # URL and key come from the environment.
row = json.loads(sys.stdin.readline())
messages = []


def say(role, text):
    messages.append({"role": role, "content": text})


def ask(max_tokens):
    answer = client.chat.completions.create(model="policy", messages=messages, max_tokens=max_tokens)
    return answer.choices[0].message.content or ""


# Two examples.
for a, b in ((12, 35), (28, 16)):
    say("user", f"How do you compute {a} + {b}?")
    say("assistant", f"I add {a} and {b}.")
    say("user", "Compute it.")
    say("assistant", f"{a} + {b} = {a + b}")

say("user", f"How do you compute {row['a']} + {row['b']}?")
say("assistant", ask(16))
say("user", "Compute it.")
# Each answer to the same messages is a new sample. The second attempt is a branch after the plan.
attempts = [re.findall(r"\d+", ask(12))[-1:] == [str(row["sum"])] for _ in range(2)]

report = {"value": float(max(attempts)), "done": True, "metrics": {"right": sum(attempts)}}
headers = {"Authorization": f"Bearer {client.api_key}", "Content-Type": "application/json"}
url = os.environ["GRPO_EPISODE_URL"] + "/reward"
urllib.request.urlopen(urllib.request.Request(url, json.dumps(report).encode(), headers))
