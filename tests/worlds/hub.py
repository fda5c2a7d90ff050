"""A stand-in for a hub of models on a port of this machine: lists repositories and hands out their files
as huggingface's library asks for them, whole or from a byte on."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants

SHA = hashlib.sha1(b"a commit").hexdigest()
LARGE = 1000
"""Files of at least so many bytes are known by their SHA-256, as the hub's are from a size on."""


@dataclass
class Hub:
    """``repos``: files by path, by repository. ``gated``: those that need ``token``. ``breaks_at``: an
    answer ends after so many bytes, and all later ones fail. ``served``: by path, where each answer
    began and how many bytes it had."""

    repos: dict[str, dict[str, bytes]]
    gated: set[str] = field(default_factory=set)
    token: str = "opens"
    breaks_at: int | None = None
    is_broken: bool = False
    served: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    url: str = ""


def _entry(path: str, content: bytes) -> dict[str, Any]:
    found: dict[str, Any] = {"size": len(content), "blobId": _blob(content, small=True)}
    if len(content) >= LARGE:
        found["lfs"] = {"size": len(content), "sha256": _blob(content), "pointerSize": 134}
    return {"rfilename": path, **found}


def _blob(content: bytes, *, small: bool = False) -> str:
    is_large = len(content) >= LARGE and not small
    return (hashlib.sha256 if is_large else hashlib.sha1)(content).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, hub: Hub, *arguments: Any) -> None:
        self._hub = hub
        super().__init__(*arguments)

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+))?", path):
            self._list(*found.groups())
        elif found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)", path):
            self._give(*found.groups())
        else:
            self._refuse(404, "NoSuchPage")

    def _list(self, repo: str, what: str | None, revision: str | None) -> None:
        files = self._hub.repos.get(repo)
        if files is None:
            self._refuse(401, "RepoNotFound")
        elif revision not in (None, "main", SHA):
            self._refuse(404, "RevisionNotFound")
        else:
            entries = [_entry(name, content) for name, content in files.items()]
            tree = [_in_tree(each) for each in entries]
            card = {"id": repo, "sha": SHA, "siblings": entries}
            content = json.dumps(tree if what == "tree" else card).encode()
            self._begin(200, {"Content-Type": "application/json"}, len(content))
            self.wfile.write(content)

    def _give(self, repo: str, name: str) -> None:
        content = self._hub.repos[repo].get(name)
        if repo in self._hub.gated and self.headers["authorization"] != f"Bearer {self._hub.token}":
            self._refuse(403, "GatedRepo")
        elif self._hub.is_broken:
            self._refuse(500, "Down")
        elif content is None:
            self._refuse(404, "EntryNotFound")
        else:
            self._send(name, content)

    def _send(self, name: str, content: bytes) -> None:
        first = int((self.headers["range"] or "bytes=0-")[6:].partition("-")[0])
        headers = {"ETag": f'"{_blob(content)}"', "X-Repo-Commit": SHA}
        if first:
            headers["Content-Range"] = f"bytes {first}-{len(content) - 1}/{len(content)}"
        self._begin(206 if first else 200, headers, len(content) - first)
        if self.command == "HEAD":
            return
        part = content[first:]
        if self._hub.breaks_at is not None and len(part) >= LARGE:
            part = part[: self._hub.breaks_at]
            self._hub.is_broken = self.close_connection = True
        self._hub.served.setdefault(name, []).append((first, len(part)))
        self.wfile.write(part)

    def _refuse(self, status: int, code: str) -> None:
        self._begin(status, {"X-Error-Code": code}, 0)

    def _begin(self, status: int, headers: dict[str, str], length: int) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(length)}.items():
            self.send_header(name, value)
        self.end_headers()


def _in_tree(entry: dict[str, Any]) -> dict[str, Any]:
    large = entry.get("lfs")
    more = {} if large is None else {"lfs": {**large, "oid": large["sha256"]}}
    return {
        "type": "file",
        "path": entry["rfilename"],
        "size": entry["size"],
        "oid": entry["blobId"],
        **more,
    }


@contextmanager
def running(hub: Hub) -> Iterator[Hub]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Handler, hub))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def environment(hub: Hub, home: Path, **more: str) -> dict[str, str]:
    """Variables by which processes find it, and a cache of their own."""
    cache = {"HF_HOME": str(home), "HF_HUB_CACHE": str(home / "hub")}
    return {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", **cache, **more}


def pointed_at(monkeypatch: pytest.MonkeyPatch, hub: Hub, home: Path) -> None:
    """Has this process find it: the library has read the variables already."""
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
    monkeypatch.setattr(
        constants,
        "HUGGINGFACE_CO_URL_TEMPLATE",
        hub.url + "/{repo_id}/resolve/{revision}/{filename}",
    )
    monkeypatch.setattr(huggingface_hub.hf_api.api, "endpoint", hub.url)
    monkeypatch.delenv("HF_TOKEN", raising=False)
