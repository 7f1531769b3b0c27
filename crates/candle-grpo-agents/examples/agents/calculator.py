"""An agent that answers with a calculator. It needs the standard library only."""

import json
import os
import sys
import urllib.request

TOOLS = [{"type": "function", "function": {
    "name": "multiply",
    "description": "Multiplies two whole numbers.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
}}]


def post(url, body):
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as reply:
        return json.load(reply)


def multiply(arguments):
    try:
        numbers = json.loads(arguments)
        return str(int(numbers["a"]) * int(numbers["b"]))
    except (KeyError, TypeError, ValueError) as error:
        return f"error: {error}"


row = json.loads(sys.stdin.readline())
messages = [{"role": "user", "content": row["question"]}]
for _ in range(4):
    body = {"model": "policy", "messages": messages, "tools": TOOLS}
    message = post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body)["choices"][0]["message"]
    messages.append(message)
    if not message.get("tool_calls"):
        break
    for call in message["tool_calls"]:
        output = multiply(call["function"]["arguments"])
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": output})
right = row["answer"] in (message["content"] or "")
post(os.environ["GRPO_EPISODE_URL"] + "/reward", {"value": float(right), "done": True})
