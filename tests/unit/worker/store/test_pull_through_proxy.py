"""The init container `pull` as the operator makes it, where only a forward proxy reaches the hub."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from specdecode_operator import manifests
from specdecode_operator.api.v1alpha1 import Spec, Status
from specdecode_operator.types import Defaults, Deployment
from specdecode_worker.__main__ import main
from specdecode_worker.models.fetch import resolve
from support.published.hub import Repository, StandInHub

MIRROR = "hub.invalid"
"""Host of the hub. No name server knows it."""
URI = "hf://org/model"


@contextmanager
def forward_proxy(hub: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the address of a proxy that knows where the hub is, and the hosts that it was asked for."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            url = urlsplit(self.path)
            asked.append(url.hostname or "")
            target = urlsplit(hub) if url.hostname == MIRROR else url
            upstream = http.client.HTTPConnection(target.hostname or "", target.port or 80, timeout=10)
            upstream.request(self.command, url.path, headers=dict(self.headers))
            answer = upstream.getresponse()
            body = answer.read()
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)
            upstream.close()

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_pull_reaches_a_mirror_through_the_proxy_that_the_workers_are_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "NO_PROXY", "no_proxy", "HF_ENDPOINT", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    # A container without the setting asks nobody but this machine.
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    repository = Repository({"config.json": b"{}", "model.safetensors": b"w" * 100})
    with StandInHub(repository) as hub, forward_proxy(hub.url) as (proxy, asked):
        settings = {"HTTP_PROXY": proxy, "HF_ENDPOINT": f"http://{MIRROR}"}
        env = [{"name": name, "value": value} for name, value in settings.items()]
        template = {"spec": {"containers": [{"name": "worker", "env": env}]}}
        workers = {"template": template}
        spec = Spec.model_validate({"model": {"uri": URI}, "speculation": {"method": "none"}, "workers": workers})
        deployment = Deployment(namespace="ns", name="llama", uid="u", generation=1, spec=spec, status=Status())
        template = manifests.pod_template(deployment, Defaults(worker_image="w", worker_image_pull_policy="Never"))
        (pull,) = template["spec"]["initContainers"]
        for variable in pull["env"]:
            monkeypatch.setenv(variable["name"], variable["value"])
        program, *words = pull["command"]
        assert program == "specdecode-worker"
        words[words.index("--cache-dir") + 1] = str(tmp_path)
        assert main(words) == 0
    assert (resolve(URI, tmp_path) / "model.safetensors").read_bytes() == b"w" * 100
    assert set(asked) == {MIRROR, "localhost"}, "large files come from another host, through the proxy too"
