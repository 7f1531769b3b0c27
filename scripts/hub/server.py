"""A server with the API of the Hugging Face hub over folders of this machine.

It answers what `huggingface_hub` and `grpo` ask for: the files of a revision, and the files themselves. Large files are at another
origin, as on the hub: `localhost` in place of `127.0.0.1`.
"""

import hashlib
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

LARGE = (".safetensors", ".gguf")
TOKEN = "hf_test"


class Repository:
    """The files of one commit, which the branch `main` and the tag `v1` name. A private one needs the token."""

    def __init__(self, folder, private=False):
        paths = (path for path in sorted(folder.rglob("*")) if path.is_file())
        self.files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
        self.private = private
        described = json.dumps([[name, sha256(contents)] for name, contents in self.files.items()])
        self.commit = hashlib.sha1(described.encode()).hexdigest()

    def has(self, revision):
        return revision in ("main", "v1", self.commit)


def sha256(contents):
    return hashlib.sha256(contents).hexdigest()


def blob_id(contents):
    return hashlib.sha1(b"blob %d\0" % len(contents) + contents).hexdigest()


def entry(name, contents):
    """A file in the listing of a tree."""
    found = {"type": "file", "path": name, "size": len(contents), "oid": blob_id(contents)}
    if name.endswith(LARGE):
        found["lfs"] = {"oid": sha256(contents), "size": len(contents), "pointerSize": 134}
    return found


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.answer()

    def do_HEAD(self):
        self.answer()

    def log_message(self, *_):
        pass

    def answer(self):
        path = urlsplit(self.path).path.strip("/")
        self.server.log.append((self.command, path, self.headers.get("Authorization")))
        if path.startswith("storage/"):
            return self.stored(path.removeprefix("storage/"))
        is_api = path.startswith("api/")
        path = path.removeprefix("api/").removeprefix("models/")
        for name, repository in self.server.repositories.items():
            if path.startswith(name + "/"):
                break
        else:
            return self.refuse(404, "RepoNotFound")
        if repository.private and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.refuse(401, "RepoNotFound")
        what, revision, *file = path.removeprefix(name + "/").split("/", 2)
        revision = unquote(revision)
        if not repository.has(revision):
            return self.refuse(404, "RevisionNotFound")
        if is_api and what == "revision":
            files = [{"rfilename": file} for file in repository.files]
            found = {"id": name.removeprefix("datasets/"), "sha": repository.commit, "siblings": files}
            return self.send(200, json.dumps(found | {"private": repository.private, "tags": []}).encode())
        if is_api and what == "tree":
            return self.send(200, json.dumps([entry(*file) for file in repository.files.items()]).encode())
        if is_api or what != "resolve" or not file:
            return self.refuse(404, "EntryNotFound")
        contents = repository.files.get(unquote(file[0]))
        if contents is None:
            return self.refuse(404, "EntryNotFound")
        headers = {"X-Repo-Commit": repository.commit}
        if not file[0].endswith(LARGE):
            return self.part(contents, headers | {"ETag": f'"{blob_id(contents)}"'})
        digest = sha256(contents)
        headers |= {"X-Linked-ETag": f'"{digest}"', "X-Linked-Size": len(contents)}
        port = self.server.server_port
        return self.send(302, b"", headers | {"Location": f"http://localhost:{port}/storage/{digest}"})

    def stored(self, digest):
        for repository in self.server.repositories.values():
            for contents in repository.files.values():
                if sha256(contents) == digest:
                    return self.part(contents, {"ETag": '"of-storage"'})
        return self.refuse(404, "EntryNotFound")

    def part(self, contents, headers):
        first = self.headers.get("Range", "").removeprefix("bytes=").removesuffix("-")
        if not first.isdigit():
            return self.send(200, contents, headers)
        start, size = int(first), len(contents)
        return self.send(206, contents[start:], headers | {"Content-Range": f"bytes {start}-{size - 1}/{size}"})

    def refuse(self, status, code):
        self.send(status, b"", {"X-Error-Code": code})

    def send(self, status, body, headers=None):
        self.send_response(status)
        for name, value in {"Content-Length": len(body), **(headers or {})}.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


def start(repositories):
    """Starts the server on a free port. `log` of it has the method, the path and the token of each request."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.repositories, server.log = repositories, []
    return server
