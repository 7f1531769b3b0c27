#!/usr/bin/env python3
"""Runs environments of other systems for grpo. It needs Python 3.10.

    bridge.py openenv URL --action FIELD     environments of OpenEnv, for `kind: program`
    bridge.py verifiers TASKSET              environments of verifiers, for `kind: agent`

docs/environments.md and docs/agents.md describe both. `openenv` with a URL needs no packages.
"""

import argparse
import asyncio
import atexit
import base64
import json
import os
import re
import socket
import ssl
import struct
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request


class Failure(Exception):
    """The environment failed for a reason outside the policy: its trajectory is excluded."""


class WebSocket:
    """A client of RFC 6455 for texts."""

    MAX_BYTES = 64 << 20

    def __init__(self, url, deadline):
        parts = urllib.parse.urlsplit(url)
        is_secure = parts.scheme in ("https", "wss")
        address = (parts.hostname, parts.port or (443 if is_secure else 80))
        self.deadline = deadline
        self.socket = socket.create_connection(address, self.left())
        try:
            if is_secure:
                context = ssl.create_default_context()
                self.socket = context.wrap_socket(self.socket, server_hostname=parts.hostname)
            self.buffer = b""
            path = parts.path.rstrip("/")
            path = path if path.endswith("/ws") else path + "/ws"
            query = f"?{parts.query}" if parts.query else ""
            key = base64.b64encode(os.urandom(16)).decode()
            self.socket.sendall(
                f"GET {path}{query} HTTP/1.1\r\nHost: {parts.netloc.rpartition('@')[2]}\r\n"
                "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
                f"Sec-WebSocket-Key: {key}\r\n\r\n".encode()
            )
            while b"\r\n\r\n" not in self.buffer:
                self.read_more()
            head, self.buffer = self.buffer.split(b"\r\n\r\n", 1)
            status = head.split(b"\r\n")[0].split()
            if len(status) < 2 or status[1] != b"101":
                line = head.split(b"\r\n")[0].decode(errors="replace")
                raise Failure(f"{url}: answered {line!r}, must accept a WebSocket")
        except BaseException:
            self.socket.close()
            raise

    def left(self):
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return left

    def read_more(self):
        self.socket.settimeout(self.left())
        more = self.socket.recv(1 << 16)
        if not more:
            raise ConnectionError("the server closed the connection")
        self.buffer += more
        if len(self.buffer) > self.MAX_BYTES:
            raise ConnectionError("a message of more than 64 MiB")

    def take(self, count):
        while len(self.buffer) < count:
            self.read_more()
        taken, self.buffer = self.buffer[:count], self.buffer[count:]
        return taken

    def send(self, payload, opcode=1):
        length, mask = len(payload), os.urandom(4)
        head = bytes([0x80 | opcode])
        if length < 126:
            head += bytes([0x80 | length])
        elif length < 1 << 16:
            head += struct.pack("!BH", 0x80 | 126, length)
        else:
            head += struct.pack("!BQ", 0x80 | 127, length)
        key = int.from_bytes((mask * (length // 4 + 1))[:length], "big")
        masked = (int.from_bytes(payload, "big") ^ key).to_bytes(length, "big")
        self.socket.settimeout(self.left())
        self.socket.sendall(head + mask + masked)

    def receive(self):
        """Returns the next text."""
        message = b""
        while True:
            first, second = self.take(2)
            length = second & 0x7F
            if length == 126:
                (length,) = struct.unpack("!H", self.take(2))
            elif length == 127:
                (length,) = struct.unpack("!Q", self.take(8))
            if len(message) + length > self.MAX_BYTES:
                raise ConnectionError("a message of more than 64 MiB")
            payload, opcode = self.take(length), first & 0x0F
            if opcode == 8:
                raise ConnectionError("the server ended the session")
            if opcode == 9:
                self.send(payload, opcode=10)
            elif opcode in (0, 1, 2):
                message += payload
                if first & 0x80:
                    return message.decode()

    def ask(self, message, deadline):
        """Returns the answer to a message, an object."""
        self.deadline = deadline
        self.send(json.dumps(message).encode())
        answer = json.loads(self.receive())
        if not isinstance(answer, dict) or not isinstance(answer.get("data"), dict):
            raise ValueError(f"answered {json.dumps(answer)[:200]}, must be an object with data")
        return answer["type"], answer["data"]

    def close(self):
        self.deadline = time.monotonic() + 1
        try:
            self.send(b'{"type": "close"}')
            self.send(b"\x03\xe8", opcode=8)
        except OSError:
            pass
        self.socket.close()


class OpenEnv:
    """Trajectories as sessions of an OpenEnv server."""

    def __init__(self, options):
        self.options = options
        self.sessions = {}
        self.deadline = 0

    def answer(self, request):
        """Returns the answer to a line of `kind: program`."""
        episode = request["episode"]
        self.deadline = time.monotonic() + self.options.timeout
        try:
            if "end" in request:
                self.close(episode)
                return {}
            if request["turn"] is None:
                return self.start(request)
            return self.turn(episode, request["completion"])
        except Failure as failure:
            self.close(episode)
            return {"error": str(failure)}

    def close(self, episode):
        session = self.sessions.pop(episode, None)
        if session:
            session.close()

    def start(self, request):
        episode, options = request["episode"], self.options
        self.close(episode)
        reset = {"seed": request["seed"], "episode_id": str(episode)}
        if options.reset:
            reset |= request["columns"][options.reset]
        pause = 0.05
        while True:
            try:
                self.sessions[episode] = self.connect()
                data = self.ask(episode, {"type": "reset", "data": reset})
                break
            except Failure:
                # No turn depends on this session yet.
                self.close(episode)
                if time.monotonic() + pause > self.deadline:
                    raise
                time.sleep(pause)
                pause = min(2 * pause, 2)
        if data.get("done"):
            raise Failure("reset: the environment is done before the first turn")
        text = self.text(data["observation"])
        if options.tools:
            text = "\n\n".join(part for part in (text, self.tools(episode)) if part)
        return {**self.said("user", text), "notify_end": True}

    def connect(self):
        url = self.options.url
        try:
            return WebSocket(url, self.deadline)
        except TimeoutError:
            raise Failure(f"{url}: no connection within {self.options.timeout} seconds") from None
        except (OSError, ValueError) as error:
            raise Failure(f"{url}: {error}") from None

    def turn(self, episode, completion):
        if not self.options.tools:
            action = self.action(completion)
            if isinstance(action, str):
                return {**self.said("user", action), "metrics": {"invalid_actions": 1}}
            data = self.ask(episode, {"type": "step", "data": action})
            if isinstance(data, str):
                return {**self.said("user", data), "metrics": {"invalid_actions": 1}}
            return self.stepped(episode, data, "user", self.text(data["observation"]))
        calls = re.findall(r"<tool_call>(.*?)</tool_call>", completion, re.DOTALL)
        if not calls:
            self.close(episode)
            return {"done": True}
        answer, texts = {}, []
        for call in calls:
            text, stepped = self.call(episode, call)
            texts.append(text)
            if "reward" in stepped:
                answer["reward"] = answer.get("reward", 0) + stepped["reward"]
            if stepped.get("done"):
                return {**answer, "done": True}
        if self.options.text:
            return {**answer, "text": "".join(f"{text}\n" for text in texts)}
        return {**answer, "messages": [{"role": "tool", "content": text} for text in texts]}

    def call(self, episode, call):
        """Returns a tool's output, and the rest of the answer."""
        try:
            call = json.loads(call)
            name, arguments = call["name"], call.get("arguments", {})
        except (ValueError, KeyError, TypeError, AttributeError):
            return 'error: a call must be {"name": ..., "arguments": {...}}', {}
        action = {"type": "call_tool", "tool_name": name, "arguments": arguments}
        data = self.ask(episode, {"type": "step", "data": action})
        if isinstance(data, str):
            return data, {}
        observation = data["observation"]
        error = observation.get("error")
        if isinstance(error, dict):
            if error.get("error_type") in ("transport_error", "timeout"):
                raise Failure(f"tool {name!r}: {error.get('message')}")
            text = f"error: {error.get('message')}"
        else:
            text = output_text(observation.get("result"))
        return text, self.stepped(episode, data, "tool", text)

    def stepped(self, episode, data, role, text):
        answer = {}
        if data.get("reward") is not None:
            answer["reward"] = float(data["reward"])
        if data.get("done"):
            self.close(episode)
            return {**answer, "done": True}
        return {**answer, **self.said(role, text)}

    def ask(self, episode, message):
        """Returns an observation's data. For an action that the server rejects, returns a text for the policy."""
        session = self.sessions.get(episode)
        if session is None:
            raise Failure("the session is lost")
        kind = message["type"]
        try:
            answer, data = session.ask(message, self.deadline)
        except TimeoutError:
            raise Failure(f"{kind}: no answer within {self.options.timeout} seconds") from None
        except (OSError, ValueError, KeyError) as error:
            raise Failure(f"{kind}: {error}") from None
        if answer == "error":
            code, words = data.get("code"), data.get("message")
            if code == "VALIDATION_ERROR" and kind == "step":
                return f"error: {words}: {json.dumps(data.get('errors'))[:500]}"
            raise Failure(f"{kind}: {code}: {words}")
        if kind == "mcp" and answer == "mcp":
            return data
        if answer != "observation" or not isinstance(data.get("observation"), dict):
            raise Failure(f"{kind}: answered {answer!r}, must be an observation")
        return data

    def tools(self, episode):
        """Describes the environment's tools for the policy."""
        request = {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}}
        data = self.ask(episode, {"type": "mcp", "data": request})
        if "result" not in data:
            raise Failure(f"tools/list: {json.dumps(data.get('error'))}")
        keys = {"name": "name", "description": "description", "inputSchema": "parameters"}
        tools = data["result"]["tools"]
        lines = [json.dumps({keys[k]: v for k, v in tool.items() if k in keys}) for tool in tools]
        call = '<tool_call>{"name": ..., "arguments": {...}}</tool_call>'
        return "\n".join(["You can call these tools:", *lines, f"Write a call as {call}."])

    def action(self, completion):
        """Returns the action that the policy wrote, or a text for the policy if there is none."""
        if self.options.action:
            return {self.options.action: completion.strip()}
        try:
            action = json.loads(completion)
        except ValueError as error:
            return f"error: the action is not JSON: {error}"
        return action if isinstance(action, dict) else "error: the action must be a JSON object"

    def text(self, observation):
        """Returns the text of an observation for the policy."""
        field = self.options.observation
        if field:
            if field not in observation:
                raise Failure(f"observation: no field {field!r}, there are {sorted(observation)}")
            return output_text(observation[field])
        rest = {k: v for k, v in observation.items() if k not in ("done", "reward", "metadata") and v is not None}
        texts = [value for value in rest.values() if isinstance(value, str)]
        return texts[0] if len(rest) == 1 and texts else json.dumps(rest) if rest else ""

    def said(self, role, text):
        """Returns the part of an answer that the policy reads."""
        if not text:
            return {}
        if self.options.text:
            return {"text": text}
        return {"messages": [{"role": role, "content": text}]}


def output_text(value):
    """Returns a tool's output as text."""
    if isinstance(value, dict) and isinstance(value.get("content"), list):
        parts = [part.get("text") for part in value["content"] if isinstance(part, dict)]
        if parts and all(isinstance(part, str) for part in parts):
            return "\n".join(parts)
    return value if isinstance(value, str) else json.dumps(value)


def serve_app(name):
    """Starts the app of an environment's package with uvicorn, and returns its URL."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    listener.set_inheritable(True)
    command = [sys.executable, "-m", "uvicorn", name, "--fd", str(listener.fileno()), "--log-level", "warning"]
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sys.stderr, close_fds=False)
    atexit.register(server.terminate)
    return f"http://127.0.0.1:{listener.getsockname()[1]}"


def openenv(options):
    output, sys.stdout = sys.stdout, sys.stderr
    if options.app:
        options.url = serve_app(options.app)
    environments = OpenEnv(options)
    for line in sys.stdin:
        request = json.loads(line)
        answer = environments.answer(request)
        print(json.dumps({"id": request["id"], **answer}), file=output, flush=True)


def post(url, key, body):
    """Returns the answer to a request, or None if there is no content."""
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as response:
        text = response.read()
    return json.loads(text) if text else None


def verifiers(options):
    """Plays episodes that grpo offers as rollouts of verifiers, whose rubric gives the rewards."""
    sys.path.insert(0, os.getcwd())
    import verifiers.v1 as vf
    from verifiers.v1.utils.loaders import load_environment, resolve_env_config

    config = {"agent": {"runtime": {"type": "subprocess"}}} | json.loads(options.config)
    config["taskset"] = config.get("taskset", {}) | {"id": options.taskset}
    environment = load_environment(resolve_env_config(config))
    if options.rows is not None:
        for task in environment.taskset.take(options.rows):
            print(json.dumps({"idx": task.data.idx, "prompt": task.data.prompt}))
        return
    tasks = {task.data.idx: task for task in environment.taskset} if environment.taskset.bounded else {}
    url, key = os.environ["GRPO_EPISODES_URL"], os.environ["GRPO_API_KEY"]

    async def play(episode):
        name = f"GRPO_KEY_{episode['id']}"
        os.environ[name] = episode["api_key"]
        client = vf.EvalClientConfig(base_url=episode["base_url"], api_key_var=name)
        context = vf.ModelContext(model="policy", client=client)
        try:
            task = tasks[episode["row"]["idx"]]
            played = await environment.run_episode(task, context)
            errors = [*played.errors, *(error for trace in played.traces for error in trace.errors)]
            report = {"value": None}
            if played.ok:
                traces = [trace for trace in played.traces if trace.agent.trainable]
                report["value"] = sum(trace.reward for trace in traces) / len(traces)
                report["metrics"] = scores(traces)
            for error in errors:
                print(f"{error.type}: {error.message}", file=sys.stderr)
        finally:
            del os.environ[name]
        await asyncio.to_thread(post, episode["reward_url"], episode["api_key"], report | {"done": True})

    async def serve():
        while True:
            episode = await asyncio.to_thread(post, url, key, {})
            if episode:
                try:
                    await play(episode)
                except urllib.error.URLError as error:
                    # grpo has ended the episode.
                    print(error, file=sys.stderr)

    async def run():
        async with environment.serving():
            await asyncio.gather(*(serve() for _ in range(options.concurrent)))

    asyncio.run(run())


def scores(traces):
    """Returns the means of rewards and metrics by name."""
    sums = {}
    for trace in traces:
        rewards = {f"reward/{name}": reward.score for name, reward in trace.rewards.items() if reward}
        metrics = {f"metric/{name}": value for name, value in trace.metrics.items()}
        for name, value in (rewards | metrics).items():
            if value is not None:
                sums[name] = sums.get(name, 0) + value / len(traces)
    return sums


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest="kind", required=True)
    of = kinds.add_parser("openenv")
    where = of.add_mutually_exclusive_group(required=True)
    where.add_argument("url", nargs="?", help="the server's address, such as http://127.0.0.1:8000")
    where.add_argument("--app", help="an app to start with uvicorn instead, such as my_env.server.app:app")
    acts = of.add_mutually_exclusive_group(required=True)
    acts.add_argument("--action", metavar="FIELD", help="the field of the action that is the turn's text")
    acts.add_argument("--json", action="store_true", help="each turn is an action in JSON")
    acts.add_argument("--tools", action="store_true", help="a turn calls tools, until one has no call")
    of.add_argument("--observation", metavar="FIELD", help="the field that the policy reads; default: all")
    of.add_argument("--reset", metavar="COLUMN", help="a column with an object of options for reset")
    of.add_argument("--text", action="store_true", help="answer with text instead of messages")
    of.add_argument("--timeout", type=float, default=40, help="seconds for an answer, with all attempts to start")
    of = kinds.add_parser("verifiers")
    of.add_argument("taskset", help="the name of an installed package with a taskset")
    of.add_argument("--config", metavar="JSON", default="{}", help="an EnvConfig of verifiers")
    of.add_argument("--rows", metavar="COUNT", type=int, help="print the first rows for data.train instead")
    of.add_argument("--concurrent", metavar="COUNT", type=int, default=16, help="rollouts at the same time")
    return parser.parse_args()


if __name__ == "__main__":
    options = arguments()
    {"openenv": openenv, "verifiers": verifiers}[options.kind](options)
