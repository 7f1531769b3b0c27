"""An agent of the package openai-agents with a tool, over both APIs of OpenAI."""

import json
import os
import sys
import urllib.request

from agents import Agent, Runner, function_tool, set_default_openai_api, set_tracing_disabled

json.loads(sys.stdin.readline())
set_tracing_disabled(True)
written = []


@function_tool
def write(text: str) -> str:
    """Writes."""
    written.append(text)
    return "written"


agent = Agent(name="writer", instructions="be brief", tools=[write], model="any")
for api in ("responses", "chat_completions"):
    set_default_openai_api(api)
    answer = Runner.run_sync(agent, f"write by {api}").final_output
    assert answer == "so", answer
assert written == ["a </tool_call> b"] * 2, written
headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
report = json.dumps({"value": 1, "done": True}).encode()
urllib.request.urlopen(urllib.request.Request(os.environ["GRPO_EPISODE_URL"] + "/reward", report, headers))
