"""An agent that answers sums. It asks once more if an answer has no number."""

import json
import os
import re
import sys
import urllib.request

from openai import OpenAI

client = OpenAI()  # URL and key come from the environment.
row = json.loads(sys.stdin.readline())
messages = [{"role": "user", "content": f"What is {row['a']} + {row['b']}?"}]
for _ in range(2):
    answer = client.chat.completions.create(model="policy", messages=messages, max_tokens=24)
    message = answer.choices[0].message
    messages.append(message.model_dump(exclude_none=True))
    numbers = re.findall(r"\d+", message.content or "")
    if numbers:
        break
    messages.append({"role": "user", "content": "Answer with the sum."})

right = numbers[-1:] == [str(row["sum"])]
report = {"value": float(right), "done": True, "metrics": {"asked": len(messages) // 2}}
headers = {"Authorization": f"Bearer {client.api_key}", "Content-Type": "application/json"}
url = os.environ["GRPO_EPISODE_URL"] + "/reward"
urllib.request.urlopen(urllib.request.Request(url, json.dumps(report).encode(), headers))
