"""Command line of the router: flags, refusals, and a clean end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from specdecode_router.__main__ import main
from specdecode_router.settings import BackendSettings
from specdecode_worker.contract import Env


def test_values_out_of_range_are_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--worker", "http://127.0.0.1:1", "--connect-seconds", "-1"]) == 2
    assert "--connect-seconds" in capsys.readouterr().err


@pytest.mark.parametrize("content", [None, ""])
def test_a_token_is_needed(
    content: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(Env.admin_token, raising=False)
    more = []
    if content is not None:
        (tmp_path / "token").write_text(content)
        more = ["--admin-token-file", str(tmp_path / "token")]
    assert main(["serve", "--port", "0", *more]) == 1
    assert "token" in capsys.readouterr().err


def test_serves_and_ends_with_code_0_after_sigterm(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "specdecode_router", "serve", "--port", "0", "--endpoint-delay-seconds", "0"]
    environment = {**os.environ, Env.admin_token: "t", "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(words, stderr=subprocess.PIPE, env=environment, text=True) as process:
        assert process.stderr is not None
        try:
            for line in process.stderr:
                if "router port: http://127.0.0.1:" in line:
                    break
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0
        finally:
            process.kill()


@pytest.mark.parametrize(
    "backends",
    [
        ["name=a,percent=60,worker=http://x", "name=b,percent=60,worker=http://y"],
        ["name=a,percent=1,worker=http://x", "name=a,percent=1,worker=http://y"],
        ["name=own,percent=1,worker=http://x"],
        ["name=a,percent=1"],
        ["name=a,percent=1,service=s"],
        ["name=a,share=1,worker=http://x"],
        ["a=10"],
        [""],
    ],
)
def test_wrong_shares_are_refused(backends: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    flags = [f"--backend={one}" for one in backends]
    assert main(["serve", "--worker", "http://127.0.0.1:1", "--deployment", "own", *flags]) == 2
    assert "backend" in capsys.readouterr().err


def test_shares_of_the_command_line() -> None:
    text = "name=next,percent=12.5,service=next-workers,token-file=/t/router"
    one = BackendSettings.model_validate(text)
    assert (one.name, one.percent, one.service, one.token_file) == ("next", 12.5, "next-workers", "/t/router")
    assert BackendSettings.model_validate("name=a,percent=0,worker=u,worker=v").workers == ("u", "v")
