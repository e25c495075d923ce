"""Command line of the router: flags, refusals, and settings that are read again."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest

from specdecode_router import process
from specdecode_router.__main__ import main
from specdecode_router.settings import BackendSettings, LiveSettings, RouterSettings
from specdecode_worker.contract import Env
from specdecode_worker.http_edge import UnusableFiles
from support.router_harness import router_over
from support.stand_in_worker import Script


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


# --- settings that are read again -----------------------------------------------------------------------------------


BACKEND = "name=next,worker=http://127.0.0.1:1"


def write(folder: Path, **values: object) -> str:
    """Replace the file as the kubelet does: by another link to a folder."""
    version = folder / f"v{len(list(folder.iterdir()))}"
    version.mkdir()
    (version / "settings.json").write_text(json.dumps(values))
    (folder / "new").symlink_to(version)
    os.replace(folder / "new", folder / "data")
    return str(folder / "data" / "settings.json")


async def test_a_running_router_uses_changed_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_FILE_CHECK_SECONDS", 0.02)
    path = write(tmp_path, hold_seconds=600, percents={"next": 10})
    async with router_over(Script(), deployment="own", backends=[BACKEND], live_settings_file=path) as router:
        state = router.state
        assert (dict(state.placement.split.percents), state.admission.limits.hold_seconds) == ({"next": 10}, 600)
        write(tmp_path, hold_seconds=0.1, no_worker_seconds=5, min_silence_seconds=2, percents={"next": 25})
        async with asyncio.timeout(5):
            while dict(state.placement.split.percents) != {"next": 25}:
                await asyncio.sleep(0.01)
        limits = state.relay.limits
        assert (limits.hold_seconds, limits.no_worker_seconds, limits.min_silence_seconds) == (0.1, 5, 2)
        state.relay.workers.update([])
        status, _, body = await router.post("/v1/chat/completions", json={"messages": []})
        assert (status, b"within 0.1 s" in body) == (503, True)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"hold_seconds": 0}, "hold_seconds"),
        ({"percents": {"next": 101}}, "percent"),
        ({"percents": 10}, "no JSON object"),
    ],
)
def test_a_bad_file_stops_the_start_and_later_leaves_the_settings(
    tmp_path: Path, values: dict[str, object], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path, hold_seconds=7)
    given = RouterSettings.model_validate({"deployment": "own", "workers": ["http://x"], "backends": [BACKEND],
                                           "live_settings_file": path})  # fmt: skip
    live = LiveSettings(given)
    write(tmp_path, **values)
    with pytest.raises(UnusableFiles, match=message):
        LiveSettings(given)
    for _ in range(2):
        live.refresh()
    assert live.current.hold_seconds == 7
    assert caplog.text.count("last good settings stay") == 1, "it is logged once"


def test_fields_of_a_newer_operator_are_left_out(tmp_path: Path) -> None:
    path = write(tmp_path, hold_seconds=7, later={"x": 1}, percents={"gone": 5})
    given = RouterSettings.model_validate({"live_settings_file": path, "workers": ["http://x"]})
    assert LiveSettings(given).current.hold_seconds == 7
