"""Settings come from the environment and are refused by the name of their variable."""

from __future__ import annotations

import pytest

from specdecode_operator.__main__ import main
from specdecode_operator.errors import SettingsError
from specdecode_operator.settings import read_settings


def test_settings_have_defaults() -> None:
    assert read_settings({"PATH": "/bin", "SPECDECODE_OPERATOR_LOG_LEVEL": ""}).poll_seconds == 5
    assert read_settings({"SPECDECODE_OPERATOR_WATCH_NAMESPACES": "a, b,"}).watch_namespaces == ("a", "b")


@pytest.mark.parametrize(
    ("name", "value"),
    [("POLL_SECONDS", "often"), ("PORT_HEALTH", "0"), ("LOG_LEVEL", "loud"), ("WORKER_IMAGE_PULL_POLICY", "Maybe")],
)
def test_an_invalid_setting_names_the_variable(name: str, value: str) -> None:
    with pytest.raises(SettingsError, match=f"SPECDECODE_OPERATOR_{name}='{value}'"):
        read_settings({f"SPECDECODE_OPERATOR_{name}": value})


def test_the_process_exits_with_2_on_an_invalid_setting(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SPECDECODE_OPERATOR_POLL_SECONDS", "-1")
    assert main(["run"]) == 2
    assert "SPECDECODE_OPERATOR_POLL_SECONDS" in capsys.readouterr().err
