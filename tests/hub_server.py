"""A stand-in for the hub's transport: the endpoints that huggingface_hub's own client calls for a push, over real HTTP.

It keeps what it is given, checks it as the hub does (token, rights, checksums), and can break a connection on demand.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

TOKEN = "hf_plantedForTheTests0123456789"
READ_ONLY_ORGANISATION = "someone-else"


@dataclass
class Hub:
    """What the stand-in holds, and what was asked of it."""

    url: str = ""
    visibility: dict[str, str] = field(default_factory=dict)
    """Of each repository."""
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    """Committed files of each repository."""
    objects: dict[str, bytes] = field(default_factory=dict)
    """Large files by their sha256, committed or not."""
    requests: list[str] = field(default_factory=list)
    broken: dict[str, int] = field(default_factory=dict)
    """How many requests whose path holds this text still lose their connection, halfway through."""


@contextmanager
def serve_hub() -> Iterator[Hub]:
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub

    def log_message(self, *args: Any) -> None:
        """Nothing on stderr."""

    def do_POST(self) -> None:
        body = self._read()
        if body is not None:
            self._answer(*self._respond(self.path.partition("?")[0], body))

    def do_PUT(self) -> None:
        body = self._read()
        if body is not None:
            name = self.path.removeprefix("/upload/")
            is_whole = hashlib.sha256(body).hexdigest() == name
            if is_whole:
                self.hub.objects[name] = body
            self._answer({} if is_whole else {"error": "checksum"}, 200 if is_whole else 400)

    def _respond(self, path: str, body: bytes) -> tuple[Any, int]:
        if path == "/api/validate-yaml":
            return {"errors": [], "warnings": []}, 200
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return {"error": "Invalid username or password."}, 401
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        repo = "/".join(path.removeprefix("/api/models").removesuffix(".git/info/lfs/objects/batch").split("/")[1:3])
        if repo not in self.hub.visibility:
            return {"error": "Repository not found"}, 404
        if "/preupload/" in path:
            names = [file["path"] for file in json.loads(body)["files"]]
            files = [{"path": n, "uploadMode": _mode(n), "shouldIgnore": False, "oid": None} for n in names]
            return {"files": files}, 200
        if path.endswith(".git/info/lfs/objects/batch"):
            return {"transfer": "basic", "objects": [self._object(o) for o in json.loads(body)["objects"]]}, 200
        if "/commit/" in path:
            return self._commit(repo, [json.loads(line) for line in body.splitlines()]), 200
        return {"error": f"no such endpoint: {path}"}, 404

    def _create(self, asked: dict[str, Any]) -> tuple[Any, int]:
        repo = f"{asked['organization']}/{asked['name']}"
        if asked["organization"] == READ_ONLY_ORGANISATION:
            return {"error": f"You don't have the rights to create a model under {asked['organization']!r}"}, 403
        if repo in self.hub.visibility:
            return {"error": "You already created this model repo", "url": self._url(repo)}, 409
        self.hub.visibility[repo] = asked.get("visibility") or ("private" if asked.get("private") else "public")
        return {"url": self._url(repo), "name": repo}, 200

    def _object(self, asked: dict[str, Any]) -> dict[str, Any]:
        if asked["oid"] in self.hub.objects:
            return {**asked}  # no action: it is here already
        return {**asked, "actions": {"upload": {"href": f"{self.hub.url}/upload/{asked['oid']}"}}}

    def _commit(self, repo: str, lines: list[dict[str, Any]]) -> dict[str, Any]:
        files = self.hub.files.setdefault(repo, {})
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.hub.objects[value["oid"]]
        return {"success": True, "commitOid": "0" * 40, "commitUrl": f"{self._url(repo)}/commit/{'0' * 40}"}

    def _read(self) -> bytes | None:
        """The request's body; None where the connection was broken in the middle of it, as asked."""
        self.hub.requests.append(f"{self.command} {self.path.partition('?')[0]}")
        length = int(self.headers.get("Content-Length", 0))
        for text, times in self.hub.broken.items():
            if text in self.path and times:
                self.hub.broken[text] -= 1
                self.rfile.read(length // 2)
                self.close_connection = True
                self.connection.shutdown(2)
                return None
        return self.rfile.read(length)

    def _answer(self, value: Any, status: int) -> None:
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _url(self, repo: str) -> str:
        return f"{self.hub.url}/{repo}"


def _mode(path: str) -> str:
    return "lfs" if path.endswith(".safetensors") else "regular"
