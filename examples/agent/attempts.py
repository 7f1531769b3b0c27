"""An agent that plans, makes two attempts after its plan, and reports the better one."""

import json
import os
import re
import sys
import urllib.request

from openai import OpenAI

client = OpenAI()  # URL and key come from the environment.
row = json.loads(sys.stdin.readline())
messages = [{"role": "user", "content": f"How do you add {row['a']} and {row['b']}?"}]


def ask():
    answer = client.chat.completions.create(model="policy", messages=messages, max_tokens=32)
    return answer.choices[0].message


messages.append(ask().model_dump(exclude_none=True))
messages.append({"role": "user", "content": f"What is {row['a']} + {row['b']}?"})
# Each answer to the same messages is a new sample. The second attempt is a branch after the plan.
attempts = [re.findall(r"\d+", ask().content or "")[-1:] == [str(row["sum"])] for _ in range(2)]

report = {"value": float(max(attempts)), "done": True, "metrics": {"right": sum(attempts)}}
headers = {"Authorization": f"Bearer {client.api_key}", "Content-Type": "application/json"}
url = os.environ["GRPO_EPISODE_URL"] + "/reward"
urllib.request.urlopen(urllib.request.Request(url, json.dumps(report).encode(), headers))
