"""A server with the API of the Hugging Face hub over folders of this machine.

It answers what `huggingface_hub` and `grpo` ask for: the files of a revision, the files themselves, and uploads to `main`. Large files
are at another origin, as on the hub: `localhost` in place of `127.0.0.1`.
"""

import base64
import hashlib
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

LARGE = (".safetensors", ".gguf")
TOKEN = "hf_test"


class Repository:
    """The files of one commit, which the branch `main` and the tag `v1` name. A private one needs the token."""

    def __init__(self, folder=None, private=False):
        paths = [path for path in sorted(folder.rglob("*")) if path.is_file()] if folder else []
        self.files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
        self.private = private

    @property
    def commit(self):
        described = json.dumps([[name, sha256(contents)] for name, contents in self.files.items()])
        return hashlib.sha1(described.encode()).hexdigest()

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

    def do_POST(self):
        text = self.body()
        lines = [json.loads(line) for line in text.splitlines()]
        path = urlsplit(self.path).path.strip("/")
        self.server.writes.append((path, lines, self.headers))
        if path == "api/validate-yaml":
            return self.send_json({"errors": [], "warnings": []})
        if path == "api/repos/create":
            return self.create(lines[0])
        if path == "api/complete":
            parts = [self.server.parts[lines[0]["oid"], part["partNumber"]] for part in lines[0]["parts"]]
            self.server.objects[lines[0]["oid"]] = b"".join(parts)
            return self.send_json({})
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.refuse(401, "RepoNotFound")
        path = path.removeprefix("api/models/")
        for name, repository in self.server.repositories.items():
            what = path.removeprefix(name)
            if what == ".git/info/lfs/objects/batch":
                return self.send_json({"objects": [self.object(name, asked) for asked in lines[0]["objects"]]})
            if what == "/verify":
                return self.send_json({}) if lines[0]["oid"] in self.server.objects else self.refuse(404, "EntryNotFound")
            if what == "/preupload/main":
                return self.send_json({"files": [self.decision(repository, file["path"]) for file in lines[0]["files"]]})
            if what == "/commit/main":
                for line in lines[1:]:
                    value = line["value"]
                    is_small = line["key"] == "file"
                    contents = base64.b64decode(value["content"]) if is_small else self.server.objects[value["oid"]]
                    repository.files[value["path"]] = contents
                return self.send_json({"success": True, "commitOid": repository.commit, "commitUrl": self.url(name)})
        return self.refuse(404, "RepoNotFound")

    def do_PUT(self):
        asked = urlsplit(self.path)
        digest, contents = asked.path.removeprefix("/storage/"), self.body()
        self.server.writes.append((self.path, contents, self.headers))
        if asked.query:
            self.server.parts[digest, int(asked.query.removeprefix("part="))] = contents
        elif sha256(contents) == digest:
            self.server.objects[digest] = contents
        else:
            return self.refuse(400, "BadDigest")
        self.send(200, b"", {"ETag": f'"{sha256(contents)[:8]}"'})

    def body(self):
        return self.rfile.read(int(self.headers["Content-Length"]))

    def url(self, path, host="127.0.0.1"):
        return f"http://{host}:{self.server.server_port}/{path}"

    def create(self, asked):
        name = f"{asked['organization']}/{asked['name']}"
        if name in self.server.repositories:
            return self.send(409, json.dumps({"error": "it exists", "url": self.url(name)}).encode())
        is_private = asked.get("private", asked.get("visibility") == "private")
        self.server.repositories[name] = Repository(private=is_private)
        return self.send_json({"url": self.url(name)})

    def decision(self, repository, path):
        contents, is_large = repository.files.get(path), path.endswith(LARGE)
        known = {} if contents is None else {"oid": sha256(contents) if is_large else blob_id(contents)}
        return {"path": path, "uploadMode": "lfs" if is_large else "regular", "shouldIgnore": False, **known}

    def object(self, name, asked):
        """How to upload a large file, by the batch API of Git LFS."""
        oid, size, part_size = asked["oid"], asked["size"], self.server.part_size
        if oid in self.server.objects:
            return asked
        stored = self.url(f"storage/{oid}", "localhost")
        upload = {"href": stored}
        if part_size:
            parts = {str(part): f"{stored}?part={part}" for part in range(1, -(-size // part_size) + 1)}
            upload = {"href": self.url("api/complete"), "header": {"chunk_size": str(part_size), **parts}}
        return asked | {"actions": {"upload": upload, "verify": {"href": self.url(f"{name}/verify")}}}

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
            if path == name or path.startswith(name + "/"):
                break
        else:
            return self.refuse(404, "RepoNotFound")
        if repository.private and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.refuse(401, "RepoNotFound")
        if path == name:
            path += "/revision/main"
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

    def send_json(self, value):
        self.send(200, json.dumps(value).encode())

    def refuse(self, status, code):
        self.send(status, b"", {"X-Error-Code": code})

    def send(self, status, body, headers=None):
        self.send_response(status)
        for name, value in {"Content-Length": len(body), **(headers or {})}.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def start(repositories):
    """Starts the server on a free port. `log` of it has the method, the path and the token of each download, and `writes` the path, the
    JSON lines or bytes, and the headers of each upload."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.repositories, server.log, server.writes = repositories, [], []
    server.objects, server.parts, server.part_size = {}, {}, None
    return server
