"""The parts of verifiers 0.4 that bridge.py uses, without its dependencies."""

import asyncio
import contextlib
import json
import os
import urllib.request
from types import SimpleNamespace


class EvalClientConfig(SimpleNamespace):
    """Its fields are base_url and api_key_var."""


class ModelContext(SimpleNamespace):
    """Its fields are model and client."""


def ask(context, text):
    """Returns the policy's answer to a text."""
    body = {"model": context.model, "messages": [{"role": "user", "content": text}]}
    headers = {"Authorization": f"Bearer {os.environ[context.client.api_key_var]}"}
    url = f"{context.client.base_url}/chat/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as response:
        return json.load(response)["choices"][0]["message"]["content"]


def trace(trainable, rewards, metrics=None, errors=()):
    scores = {name: None if score is None else SimpleNamespace(score=score) for name, score in rewards.items()}
    return SimpleNamespace(
        agent=SimpleNamespace(trainable=trainable),
        errors=list(errors),
        metrics=metrics or {},
        reward=sum(score for score in rewards.values() if score is not None),
        rewards=scores,
    )


class Taskset:
    bounded = True

    def __iter__(self):
        for idx in range(4):
            yield SimpleNamespace(data=SimpleNamespace(idx=idx, prompt=f"What is {idx} + 5?"))

    def take(self, count):
        return list(self)[:count]


class Environment:
    """The first word of an answer decides how the episode ends."""

    def __init__(self, config):
        assert config["agent"]["runtime"]["type"] in ("subprocess", "docker")
        assert config["taskset"]["id"] == "sums"
        self.taskset = Taskset()

    @contextlib.asynccontextmanager
    async def serving(self):
        yield

    async def run_episode(self, task, context):
        answer = await asyncio.to_thread(ask, context, task.data.prompt)
        error = SimpleNamespace(type="RuntimeError", message="no disk")
        match answer.split()[0]:
            case "rubric":
                # A rubric has failed, after some of its rewards.
                traces = [trace(True, {"right": 1.0, "short": None}, errors=[error])]
                return SimpleNamespace(ok=False, errors=[], traces=traces)
            case "harness":
                return SimpleNamespace(ok=False, errors=[error], traces=[])
            case "raises":
                raise RuntimeError("no place")
        judge = trace(False, {"right": 9.0})
        first = trace(True, {"right": 1.0, "short": 0.25}, {"letters": 2})
        second = trace(True, {"right": 0.0, "short": None}, {"letters": 4})
        return SimpleNamespace(ok=True, errors=[], traces=[first, judge, second])
