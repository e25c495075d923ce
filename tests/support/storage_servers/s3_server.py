"""A real S3 server on loopback, or on an address of the cluster: SeaweedFS, with one key."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx

from support.processes import free_ports

KEY, SECRET = "test-key", "test-secret"
_START_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class S3Server:
    """Running server. ``environment`` has AWS's variables for its clients."""

    url: str

    @property
    def environment(self) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL_S3": self.url,
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
        }

    def make_bucket(self, name: str) -> None:
        """Make a bucket, with an object in it."""
        _put(self.url, name)


@contextlib.contextmanager
def s3_server(folder: Path, address: str = "127.0.0.1") -> Iterator[S3Server]:
    """Yield a server that keeps its objects in ``folder``. It makes a bucket for the first object in it."""
    users = [{"name": "t", "credentials": [{"accessKey": KEY, "secretKey": SECRET}], "actions": ["Admin"]}]
    (folder / "users.json").write_text(json.dumps({"identities": users}))
    names = ("master.port", "master.port.grpc", "volume.port", "volume.port.grpc", "filer.port", "filer.port.grpc")
    names += ("s3.port", "s3.port.grpc")
    ports = dict(zip(names, free_ports(len(names), address), strict=True))
    words = [_program(), "server", f"-dir={folder}", f"-ip={address}", f"-ip.bind={address}", "-filer", "-s3"]
    words += [f"-{name}={port}" for name, port in ports.items()]
    words += ["-s3.port.iceberg=0", "-s3.port.lance=0", f"-s3.config={folder / 'users.json'}"]
    words += ["-master.telemetry=false", "-master.volumeSizeLimitMB=64", "-volume.max=200"]
    url = f"http://{address}:{ports['s3.port']}"
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(words, stdout=log, stderr=log, cwd=folder)
    try:
        _wait_ready(process, url, folder / "log")
        yield S3Server(url)
    finally:
        process.kill()
        process.wait()


def _program() -> str:
    """Return the path of the server, which a package of the test group installs."""
    path = shutil.which("weed", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
    assert path is not None, "weed is missing: run `make venv`"
    return path


def _wait_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    """Wait until an object can be written: the volume server registers after the gateway listens."""
    from obstore.exceptions import BaseError

    deadline = time.monotonic() + _START_SECONDS
    while True:
        assert process.poll() is None, log.read_text()
        with contextlib.suppress(httpx.HTTPError, BaseError):
            httpx.get(url, timeout=5)
            _put(url, "ready")
            return
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)


def _put(url: str, bucket: str) -> None:
    """Write an object to a bucket, which makes the bucket."""
    from obstore import put
    from obstore.store import S3Store

    store = S3Store(
        bucket, endpoint=url, aws_endpoint_url_s3=url, region="us-east-1", access_key_id=KEY,
        secret_access_key=SECRET, client_options={"allow_http": True}, retry_config={"max_retries": 0},
    )  # fmt: skip
    put(store, "ready", b"ready")
