"""Stand-in for a model hub in a pod with the worker's image: serves the embedded model as org/model.

The test mounts this file. ``PUT /head`` with a commit as the body moves the branch main; ``GET /listings`` returns the
revisions that were listed so far.
"""

from __future__ import annotations

import hashlib
import json
import re
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from specdecode_worker import embedded

PORT = 8080
MODEL = embedded.folder("smollm2-135m-instruct", Path("/tmp/cache"))
LISTING = re.compile(r"/api/models/org/model/revision/([\w.-]+)")
CONTENT = re.compile(r"/org/model/resolve/[0-9a-f]{40}/([\w.-]+)")
state: dict[str, Any] = {"head": "a" * 40, "listings": []}


@cache
def digest_of(name: str) -> str:
    return hashlib.sha256((MODEL / name).read_bytes()).hexdigest()


class Handler(BaseHTTPRequestHandler):
    """Handler of the hub's API and of the test's requests."""

    def do_GET(self) -> None:
        if listing := LISTING.fullmatch(self.path):
            revision = listing[1]
            state["listings"].append(revision)
            siblings = [{"rfilename": file.name} for file in MODEL.iterdir() if file.is_file()]
            commit = state["head"] if revision == "main" else revision
            self.answer(json.dumps({"id": "org/model", "sha": commit, "siblings": siblings}).encode())
        elif content := CONTENT.fullmatch(self.path):
            file = MODEL / Path(content[1]).name
            self.answer(file.read_bytes(), {"ETag": f'"{digest_of(file.name)}"'})
        else:
            self.answer(json.dumps(state["listings"]).encode())

    do_HEAD = do_GET

    def do_PUT(self) -> None:
        state["head"] = self.rfile.read(int(self.headers["Content-Length"])).decode()
        self.answer(b"{}")

    def answer(self, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(200)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


if __name__ == "__main__":
    ThreadingHTTPServer(("", PORT), Handler).serve_forever()
