"""A hub on this machine's loopback: what `huggingface_hub` asks for when it fetches a repository, and what it gets."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

COMMITS = {"main": "0123456789abcdef0123456789abcdef01234567", "v1": "f" * 40}


@dataclass
class Hub:
    """``repos``: name to files. ``broken``: files whose next transfer ends half way. ``asked``: what was requested."""

    repos: dict[str, dict[str, bytes]]
    gated: tuple[str, ...] = ()
    broken: list[str] = field(default_factory=list)
    asked: list[tuple[str, str, str | None]] = field(default_factory=list)
    url: str = ""

    def fetched(self) -> list[str]:
        """Names of the files whose content was sent, in order."""
        sent = (path for method, path, _ in self.asked if method == "GET" and "/resolve/" in path)
        return [path.rsplit("/resolve/", 1)[1].split("/", 1)[1] for path in sent]


@contextmanager
def running(hub: Hub) -> Iterator[Hub]:
    """``hub`` on a port of its own."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def do_HEAD(self) -> None:
            self.answer(body=False)

        def do_GET(self) -> None:
            self.answer(body=True)

        def answer(self, body: bool) -> None:
            path = unquote(urlsplit(self.path).path)
            hub.asked.append((self.command, path, self.headers.get("Range")))
            parts = path.strip("/").removeprefix("api/models/").split("/")
            repo, rest = "/".join(parts[:2]), parts[2:]
            if repo in hub.gated:
                return self.refuse(403, "GatedRepo")
            if repo not in hub.repos:
                return self.refuse(404, "RepoNotFound")
            files = hub.repos[repo]
            revision = rest[1] if len(rest) > 1 else "main"
            commit = COMMITS.get(revision, revision)
            if commit not in COMMITS.values():
                return self.refuse(404, "RevisionNotFound")
            if rest[:1] == ["resolve"]:
                name = "/".join(rest[2:])
                if name not in files:
                    return self.refuse(404, "EntryNotFound")
                return self.send(files[name], commit, body, name)
            listed = [{"type": "file", "oid": _etag(data), "size": len(data), "path": n} for n, data in files.items()]
            info = {"id": repo, "sha": commit, "siblings": [{"rfilename": name} for name in files]}
            return self.reply(json.dumps(listed if rest[:1] == ["tree"] else info).encode())

        def refuse(self, status: int, code: str) -> None:
            self.send_response(status)
            self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def reply(self, data: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def send(self, data: bytes, commit: str, body: bool, name: str) -> None:
            wanted = self.headers.get("Range")
            start = int(wanted.removeprefix("bytes=").split("-")[0]) if wanted else 0
            self.send_response(206 if wanted else 200)
            self.send_header("ETag", f'"{_etag(data)}"')
            self.send_header("X-Repo-Commit", commit)
            self.send_header("Accept-Ranges", "bytes")
            if wanted:
                self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
            self.send_header("Content-Length", str(len(data) - start))
            self.end_headers()
            if not body:
                return
            if name in hub.broken:
                hub.broken.remove(name)
                self.wfile.write(data[start : len(data) // 2])
                self.wfile.flush()
                self.close_connection = True
                self.connection.shutdown(2)
                return
            self.wfile.write(data[start:])

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


def _etag(data: bytes) -> str:
    return hashlib.sha1(data, usedforsecurity=False).hexdigest()
