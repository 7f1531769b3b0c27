"""An agent with a calculator. Two examples in its first request show how to call it."""

import json
import os
import re
import sys
import urllib.request

PARAMETERS = {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}
TOOL = {"name": "calculator", "description": "Computes a sum.", "parameters": PARAMETERS}


def post(url, body):
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as response:
        return json.load(response)


def calculate(arguments):
    expression = str(json.loads(arguments).get("expression"))
    if not re.fullmatch(r"\d{1,9}( ?\+ ?\d{1,9}){0,9}", expression):
        return "error: not a sum"
    return str(sum(map(int, expression.split("+"))))


row = json.loads(sys.stdin.readline())
messages = [{"role": "system", "content": "You have a calculator: write [5+3] to use it."}]
for a, b in ((5, 3), (2, 4)):
    messages += [
        {"role": "user", "content": f"What is {a} + {b}?"},
        {"role": "assistant", "content": f"[{a}+{b}]"},
        {"role": "tool", "content": str(a + b), "tool_call_id": "example"},
        {"role": "assistant", "content": f"The answer is {a + b}."},
    ]
messages.append({"role": "user", "content": f"What is {row['a']} + {row['b']}?"})

calls = 0
for _ in range(3):
    body = {"model": "policy", "messages": messages, "tools": [{"type": "function", "function": TOOL}], "max_tokens": 24}
    message = post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body)["choices"][0]["message"]
    messages.append(message)
    if not message.get("tool_calls"):
        break
    for call in message["tool_calls"]:
        calls += 1
        output = calculate(call["function"]["arguments"])
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": output})

numbers = re.findall(r"\d+", message.get("content") or "")
right = calls > 0 and numbers[-1:] == [str(row["sum"])]
post(os.environ["GRPO_EPISODE_URL"] + "/reward", {"value": float(right), "done": True, "metrics": {"calls": calls}})
