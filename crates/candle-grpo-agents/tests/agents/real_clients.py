"""Speaks all APIs of the server with the packages of OpenAI and Anthropic."""

import json
import os
import sys
import urllib.request

import anthropic
import openai

row = json.loads(sys.stdin.readline())
client = openai.OpenAI()
PARAMETERS = {"type": "object", "properties": {"text": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": "write", "description": "Writes.", "parameters": PARAMETERS}}]
ARGUMENTS = {"text": "a </tool_call> b"}


def chat(streams):
    messages = [{"role": "user", "content": f"chat {streams}"}]
    arguments = {"model": "any", "messages": messages, "tools": TOOLS}
    if streams:
        with client.chat.completions.stream(**arguments) as stream:
            for _ in stream:
                pass
            message = stream.get_final_completion().choices[0].message
    else:
        message = client.chat.completions.create(**arguments).choices[0].message
    call = message.tool_calls[0]
    assert json.loads(call.function.arguments) == ARGUMENTS, call
    messages.append(message.model_dump(exclude_none=True, exclude={"parsed"}))
    messages.append({"role": "tool", "tool_call_id": call.id, "content": "written"})
    for message in messages:
        for call in message.get("tool_calls") or []:
            call["function"].pop("parsed_arguments", None)
            call.pop("index", None)
    answer = client.chat.completions.create(**arguments)
    assert answer.choices[0].message.content == "so", answer
    assert answer.choices[0].finish_reason == "stop"


def responses(streams):
    tools = [{"type": "function", "name": "write", "description": "Writes.", "parameters": PARAMETERS, "strict": False}]
    question = [{"role": "user", "content": f"responses {streams}"}]
    arguments = {"model": "any", "tools": tools, "instructions": "be brief"}
    if streams:
        with client.responses.stream(input=question, **arguments) as stream:
            for _ in stream:
                pass
            first = stream.get_final_response()
    else:
        first = client.responses.create(input=question, **arguments)
    call = next(item for item in first.output if item.type == "function_call")
    assert json.loads(call.arguments) == ARGUMENTS, call
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "written"}
    second = client.responses.create(input=[result], previous_response_id=first.id, **arguments)
    assert second.output_text == "so", second


def messages(streams):
    client = anthropic.Anthropic()
    tools = [{"name": "write", "description": "Writes.", "input_schema": PARAMETERS}]
    messages = [{"role": "user", "content": f"messages {streams}"}]
    arguments = {"model": "any", "max_tokens": 500, "tools": tools, "messages": messages}
    if streams:
        with client.messages.stream(**arguments) as stream:
            for _ in stream:
                pass
            answer = stream.get_final_message()
    else:
        answer = client.messages.create(**arguments)
    assert answer.stop_reason == "tool_use", answer
    call = answer.content[-1]
    assert call.input == ARGUMENTS, call
    messages.append({"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in answer.content]})
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "written"}
    messages.append({"role": "user", "content": [result]})
    answer = client.messages.create(**arguments)
    assert answer.content[0].text == "so", answer


for streams in (False, True):
    chat(streams)
    responses(streams)
    messages(streams)
assert client.completions.create(model="any", prompt="ab").choices[0].text == "so"
assert client.models.list().data
try:
    client.chat.completions.create(model="any", messages=[{"role": "user", "content": "n"}], n=2)
    sys.exit("n was not refused")
except openai.BadRequestError as error:
    assert error.param == "n", error
headers = {"Authorization": f"Bearer {client.api_key}"}
url = os.environ["GRPO_EPISODE_URL"] + "/reward"
urllib.request.urlopen(urllib.request.Request(url, b'{"value": 1, "done": true}', headers))
