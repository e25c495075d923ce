"""Tests of error texts for clients: they name no path of the server's file system."""

from __future__ import annotations

import pytest

from specdecode_worker.server.errors import BadRequest, EngineFailed, without_paths


@pytest.mark.parametrize(
    ("text", "public"),
    [
        ("FileNotFoundError: [Errno 2] No such file: '/models/llama/config.json'", "FileNotFoundError: [Errno 2] No "
         "such file: '[path]'"),
        ("file:///models/llama has no weights", "[path] has no weights"),
        ("cannot connect to ipc:///tmp/specdecode-1/engine", "cannot connect to [path]"),
        ('File "/usr/lib/python3/site.py", line 3', 'File "[path]", line 3'),
        ("the engine process ended with exit code -9", "the engine process ended with exit code -9"),
        ("12 tokens/s and/or 1/2", "12 tokens/s and/or 1/2"),
    ],
)  # fmt: skip
def test_paths_are_replaced(text: str, public: str) -> None:
    assert without_paths(text) == public


def test_errors_of_the_server_name_no_paths_and_those_of_clients_are_left_alone() -> None:
    assert EngineFailed("no /models/x").body()["error"]["message"] == "no [path]"
    assert BadRequest("no /v1/x").body()["error"]["message"] == "no /v1/x"
