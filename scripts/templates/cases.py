"""Renders chat templates with transformers, as cases of the golden test of chat templates.

usage: cases.py OUT TEMPLATE.. : files of Jinja, or folders with files that end in .jinja. Writes OUT/chat_templates.json.
"""

import datetime
import json
import sys
from pathlib import Path

from transformers.utils import chat_template_utils

NOW = "2025-03-05T14:07:09"
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}


def tool(name, properties):
    parameters = {"type": "object", "properties": properties, "required": list(properties)[:1]}
    return {"type": "function", "function": {"name": name, "description": f"The tool {name}.", "parameters": parameters}}


TOOLS = [
    tool("weather", {"town": {"type": "string", "description": "A town, such as Zürich"}, "day": {"type": "integer"}}),
    tool("add", {"zeta": {"type": "number"}, "alpha": {"type": "number", "enum": [1.5, 2]}}),
]
CALL = {"type": "function", "id": "call00001", "function": {"name": "add", "arguments": {"zeta": 1.5, "alpha": 2}}}


def message(role, content, **more):
    return {"role": role, "content": content, **more}


USER, ANSWER = message("user", "Grüße, 1.5 + 2?\n"), message("assistant", "It is 3.5.")
REASONED = message("assistant", "It is 3.5.", reasoning_content="Add them.")
TAGGED = message("assistant", "<think>\nAdd 1.5 é and 2.\n</think>\n\nIt is 3.5.")
CALLING = message("assistant", "", tool_calls=[CALL])
RESULT = message("tool", "3.5", name="add", tool_call_id="call00001")
SYSTEM = message("system", "Be brief.")
CONVERSATIONS = {
    "user": [USER],
    "system": [SYSTEM, USER],
    "answer": [USER, ANSWER],
    "turns": [SYSTEM, USER, ANSWER, message("user", "And more?"), ANSWER],
    "reasoning": [USER, REASONED],
    "tags": [USER, TAGGED, message("user", "And more?")],
    "call": [USER, CALLING, RESULT],
    "called": [SYSTEM, USER, CALLING, RESULT, ANSWER, message("user", "And more?")],
}


class Clock(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return cls.fromisoformat(NOW)


def cases(path):
    template = path.read_text(encoding="utf-8")
    for name, messages in CONVERSATIONS.items():
        for tools in (None, TOOLS):
            for options in ({}, {"enable_thinking": False}):
                for prompts in (True, False):
                    case = {
                        "name": f"{path.stem} {name} tools={bool(tools)} {options} {prompts}",
                        "template": template,
                        "messages": messages,
                        "tools": tools,
                        "variables": {**SPECIAL, **options},
                        "add_generation_prompt": prompts,
                        "now": NOW,
                    }
                    try:
                        texts, _ = chat_template_utils.render_jinja_template(
                            [messages], tools=tools, chat_template=template, add_generation_prompt=prompts, **SPECIAL, **options
                        )
                        case["expected"] = texts[0]
                    except Exception:
                        # Any error will do.
                        case["expected_error"] = ""
                    yield case


def main():
    out, *names = map(Path, sys.argv[1:])
    chat_template_utils.datetime = Clock
    files = [file for name in names for file in (sorted(name.glob("*.jinja")) if name.is_dir() else [name])]
    found = [case for file in files for case in cases(file)]
    out.mkdir(parents=True, exist_ok=True)
    (out / "chat_templates.json").write_text(json.dumps(found, ensure_ascii=False), encoding="utf-8")
    print(f"{len(files)} templates, {len(found)} cases, {sum('expected' in case for case in found)} of them texts")


if __name__ == "__main__":
    main()
