"""An agent that calls a tool until a turn has no call. It needs the standard library only."""

import http.client
import json
import os
import sys
import urllib.parse

row = json.loads(sys.stdin.readline())
url = urllib.parse.urlparse(os.environ["OPENAI_BASE_URL"])
connection = http.client.HTTPConnection(url.hostname, url.port)
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
messages = [{"role": "user", "content": row["question"]}]
while True:
    body = json.dumps({"messages": messages, "tools": row["tools"]})
    connection.request("POST", url.path + "/chat/completions", body, headers)
    answer = json.load(connection.getresponse())
    message = answer["choices"][0]["message"] if "choices" in answer else {}
    if not message.get("tool_calls"):
        break
    messages.append(message)
    for call in message["tool_calls"]:
        text = json.loads(call["function"]["arguments"])["text"]
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": str(len(text))})
