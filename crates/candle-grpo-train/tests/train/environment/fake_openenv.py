"""A server with the WebSocket protocol of OpenEnv, and faults.

    fake_openenv.py FAULTS COUNTS

FAULTS is a list with commas, or `none`. It prints its port. COUNTS is a file with the number of sessions, of open ones, of
the most that were open at once, and of faults that end a session after its start.
"""

import base64
import hashlib
import json
import random
import socket
import struct
import sys
import threading

START = ["capacity", "closed", "status", "wrong"]
STEP = ["lost", "cut", "text", "list", "error", "state"]
faults, path = sys.argv[1].split(","), sys.argv[2]
draw, lock = random.Random(7), threading.Lock()
counts = {"sessions": 0, "open": 0, "most": 0, "fatal": 0}
may_fail_start = True


def count(**changes):
    with lock:
        for name, change in changes.items():
            counts[name] += change
        counts["most"] = max(counts["most"], counts["open"])
        with open(path, "w") as file:
            json.dump(counts, file)
        return dict(counts)


def chosen(kinds, chance):
    """A fault among those that the test asks for, or None."""
    kinds = [kind for kind in kinds if kind in faults]
    with lock:
        return draw.choice(kinds) if kinds and draw.random() < chance else None


class Session:
    def __init__(self, connection):
        self.file, self.connection = connection.makefile("rb"), connection

    def handshake(self):
        key = None
        while (line := self.file.readline().strip()):
            name, _, value = line.partition(b":")
            if name.lower() == b"sec-websocket-key":
                key = value.strip()
        accept = base64.b64encode(hashlib.sha1(key + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest())
        head = b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: "
        self.connection.sendall(head + accept + b"\r\n\r\n")

    def receive(self):
        first, second = self.file.read(2)
        assert first & 0x80 and second & 0x80
        length = second & 0x7F
        if length == 126:
            (length,) = struct.unpack("!H", self.file.read(2))
        elif length == 127:
            (length,) = struct.unpack("!Q", self.file.read(8))
        mask, payload = self.file.read(4), self.file.read(length)
        text = bytes(byte ^ mask[i % 4] for i, byte in enumerate(payload))
        return None if first & 0x0F == 8 else json.loads(text)

    def send(self, text, cut=False):
        """Sends a ping, and a text in two frames."""
        payload = text.encode()
        half = len(payload) // 2
        message = b"\x89\x02hi" + self.frame(0x01, payload[:half])
        self.connection.sendall(message if cut else message + self.frame(0x80, payload[half:]))
        if not cut:
            pong = self.file.read(8)
            if len(pong) < 8:
                raise ConnectionError("the client left")
            assert pong.startswith(b"\x8a\x82")

    @staticmethod
    def frame(first, payload):
        length = len(payload)
        head = bytes([first, length]) if length < 126 else struct.pack("!BBH", first, 126, length)
        return head + payload

    def observe(self, text, reward=None, done=False):
        data = {"observation": {"text": text}, "reward": reward, "done": done}
        self.send(json.dumps({"type": "observation", "data": data}))

    def fail(self, code):
        self.send(json.dumps({"type": "error", "data": {"code": code, "message": "no disk"}}))

    def play(self):
        global may_fail_start
        fault = chosen(START, 0.5) if may_fail_start or "always" in faults else None
        # Otherwise a start might fail until its time is over.
        may_fail_start = not fault
        if fault == "status":
            self.connection.sendall(b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n")
            return
        self.handshake()
        if fault == "closed":
            return
        if fault == "capacity":
            # The client may not have read the first message yet: no pong comes next.
            error = {"type": "error", "data": {"code": "CAPACITY_REACHED", "message": "no disk"}}
            return self.connection.sendall(self.frame(0x81, json.dumps(error).encode()))
        message = self.receive()
        assert message["type"] == "reset" and message["data"]["episode_id"] and message["data"]["seed"] >= 0, message
        if fault == "wrong":
            return self.send("{")
        number = count(sessions=1, open=1)["sessions"]
        try:
            # The letters that the tests' policy has.
            name = "".join("abcde"[number // 5**i % 5] for i in range(5))
            self.observe(name)
            turns = 0
            while (message := self.receive()) and message["type"] != "close":
                assert message["type"] == "step", message
                if message["data"].get("message") == "invalid":
                    self.fail("VALIDATION_ERROR")
                    continue
                turns += 1
                fault = chosen(STEP + ["hang"], 0.2)
                if fault:
                    count(fatal=1)
                if fault == "lost":
                    return
                if fault == "cut":
                    return self.send("[1, 2]", cut=True)
                if fault == "text":
                    self.send("{")
                elif fault == "list":
                    self.send("[1, 2]")
                elif fault == "state":
                    self.send('{"type": "state", "data": {}}')
                elif fault == "error":
                    self.fail("EXECUTION_ERROR")
                elif fault != "hang":
                    self.observe(name + message["data"]["message"], reward=1, done=turns == 2)
        finally:
            count(open=-1)


def serve(connection):
    with connection:
        try:
            Session(connection).play()
        except (OSError, ValueError) as error:
            # The client has left.
            print(error, file=sys.stderr)


listener = socket.create_server(("127.0.0.1", 0))
count()
print(listener.getsockname()[1], flush=True)
while True:
    connection, _ = listener.accept()
    threading.Thread(target=serve, args=(connection,), daemon=True).start()
