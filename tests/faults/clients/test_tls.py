"""TLS of all ports: the certificate is read again while the server runs, and a broken one is not used."""

from __future__ import annotations

import os
import shutil
import ssl
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from support.certificates import ELLIPTIC, self_signed
from support.faults import raw_clients
from support.faults.bounds import HEALTH_P99_SECONDS, seconds_until
from support.faults.workers import ADMIN_HEADERS, ADMIN_TOKEN, fake_worker
from support.worker_process import ServerProcess, WorkerProcess, running_router

RELOAD_SECONDS = 5
"""Time after a change of the files until new connections use the new certificate."""
HANDSHAKE_SECONDS = 2
KEY_KINDS = {"first": ("rsa:2048",), "second": ELLIPTIC}


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with two self-signed certificates for loopback, with keys of different kinds."""
    folder = tmp_path_factory.mktemp("certificates")
    for name, kind in KEY_KINDS.items():
        self_signed(folder, name, "-addext", "subjectAltName=IP:127.0.0.1", key_kind=kind)
    return folder


@pytest.fixture(params=["worker", "router"])
def server(
    certificates: Path,
    small_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> Iterator[ServerProcess]:
    """Yield a server with TLS and the first certificate, whose files are in ``tmp_path``."""
    _install(certificates, "first", tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificates / "first.crt"))  # of the harness, which calls /ready
    files = {"tls_cert_file": str(tmp_path / "tls.crt"), "tls_key_file": str(tmp_path / "tls.key")}
    if request.param == "router":
        flags = [f"--header-timeout-seconds={HANDSHAKE_SECONDS}"]
        flags += [f"--{name.replace('_', '-')}={path}" for name, path in files.items()]
        with running_router(["http://127.0.0.1:9"], tmp_path / "log", ADMIN_TOKEN, *flags) as router:
            yield router
        return
    with fake_worker(small_folder, tmp_path / "log", header_timeout_seconds=HANDSHAKE_SECONDS, **files) as started:
        yield started


def test_changed_certificate_is_used_without_a_restart(
    server: ServerProcess, certificates: Path, tmp_path: Path
) -> None:
    assert server.public.startswith("https://")
    trusts_first, trusts_second = (_context(certificates / f"{name}.crt") for name in KEY_KINDS)
    with httpx.Client(verify=trusts_first) as open_client:
        for url in _urls(server):
            assert open_client.get(url, headers=ADMIN_HEADERS).status_code == 200
        _install(certificates, "second", tmp_path)
        seconds = seconds_until(lambda: _is_trusted(server.public, trusts_second), RELOAD_SECONDS)
        print(f"the second certificate is used after {seconds:.1f} s")
        assert open_client.get(server.public + "/health").status_code == 200
    for url in _urls(server):
        assert httpx.get(url, headers=ADMIN_HEADERS, verify=trusts_second).status_code == 200
    assert not _is_trusted(server.public, trusts_first)

    (tmp_path / "tls.key").write_text("no key")
    seconds_until(lambda: "the previous one stays" in server.log, RELOAD_SECONDS)
    began = time.monotonic()
    assert httpx.get(server.public + "/health", verify=trusts_second).status_code == 200
    assert time.monotonic() - began <= HEALTH_P99_SECONDS
    _install(certificates, "first", tmp_path)
    seconds_until(lambda: _is_trusted(server.public, trusts_first), RELOAD_SECONDS)


def test_old_protocol_versions_and_plain_http_are_refused(server: ServerProcess, certificates: Path) -> None:
    old = _context(certificates / "first.crt")
    old.minimum_version, old.maximum_version = ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1
    old.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.raises(httpx.ConnectError):
        httpx.get(server.public + "/health", verify=old)
    with pytest.raises(httpx.HTTPError):
        httpx.get(server.public.replace("https", "http") + "/health")


def test_handshake_that_never_ends_is_closed(server: ServerProcess) -> None:
    with raw_clients.connect(server.public) as connection:
        connection.settimeout(HANDSHAKE_SECONDS + 1)
        began = time.monotonic()
        assert connection.recv(1) == b""
    print(f"closed after {time.monotonic() - began:.1f} s")


def _urls(server: ServerProcess) -> list[str]:
    """Return a URL of each port of a server."""
    admin = [f"{server.admin}/v1/report"] if isinstance(server, WorkerProcess) else []
    return [f"{server.public}/health", *admin]


def _install(certificates: Path, name: str, folder: Path) -> None:
    """Replace the files of the worker by those of the certificate ``name``, one after the other."""
    for ending in ("crt", "key"):
        shutil.copy(certificates / f"{name}.{ending}", folder / f"new.{ending}")
        os.replace(folder / f"new.{ending}", folder / f"tls.{ending}")


def _context(trusted: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(trusted))


def _is_trusted(url: str, context: ssl.SSLContext) -> bool:
    """Return whether a new connection shows a certificate that ``context`` trusts."""
    try:
        return httpx.get(f"{url}/health", verify=context).status_code == 200
    except httpx.ConnectError:
        return False
