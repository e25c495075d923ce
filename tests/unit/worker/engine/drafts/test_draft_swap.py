"""Draft swaps: in order, without blocking, and with an error message for a draft that does not fit."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from specdecode_worker.contract import DraftConfig
from specdecode_worker.engine.drafts.draft_swap import DraftSwap, DraftSwapQueue
from specdecode_worker.engine.ipc.messages import SetDraft
from specdecode_worker.models.errors import ModelError


def asked(call_id: int, uri: str, name: str = "") -> SetDraft:
    return SetDraft(call_id, DraftConfig(method="eagle3", uri=uri).model_dump_json().encode(), name)


def wait(swaps: DraftSwapQueue) -> list[DraftSwap]:
    finished: list[DraftSwap] = []
    deadline = time.monotonic() + 10
    while swaps.pending:
        assert time.monotonic() < deadline
        finished += swaps.finished()
    return finished


def test_drafts_load_in_the_background_and_finish_in_order() -> None:
    gate = threading.Event()

    def load(config: DraftConfig, name: str = "") -> Any:
        gate.wait(10)
        return (config.uri, name)

    swaps = DraftSwapQueue(load)
    swaps.begin(asked(1, "file:///a"))
    swaps.begin(asked(2, "file:///b", "code"))
    assert swaps.pending
    assert list(swaps.finished()) == []
    gate.set()
    assert [(swap.call_id, swap.loaded) for swap in wait(swaps)] == [
        (1, ("file:///a", "")),
        (2, ("file:///b", "code")),
    ]
    swaps.close()


def test_unusable_draft_is_reported_and_the_next_one_loads() -> None:
    def load(config: DraftConfig, name: str = "") -> Any:
        if config.uri == "file:///bad":
            raise ModelError("fc.weight is missing")
        return config.uri

    swaps = DraftSwapQueue(load)
    swaps.begin(asked(1, "file:///bad"))
    swaps.begin(SetDraft(2, b"{}"))
    swaps.begin(SetDraft(3, b'{"method": "none"}'))
    swaps.begin(asked(4, "file:///good"))
    bad, unread, none, good = wait(swaps)
    assert (bad.loaded, bad.problem) == (None, "fc.weight is missing")
    assert "draft.uri is needed" in unread.problem
    assert "method none is no draft" in none.problem
    assert good.loaded == "file:///good"


def test_a_bug_in_loading_is_raised() -> None:
    def load(config: DraftConfig, name: str = "") -> Any:
        raise ZeroDivisionError

    swaps = DraftSwapQueue(load)
    swaps.begin(asked(1, "file:///a"))
    with pytest.raises(ZeroDivisionError):
        wait(swaps)


def test_an_engine_without_a_loader_reports_it() -> None:
    swaps = DraftSwapQueue(None)
    swaps.begin(asked(1, "file:///a"))
    assert "cannot load" in wait(swaps)[0].problem


def test_a_broken_device_is_raised_even_behind_a_model_error() -> None:
    def load(config: DraftConfig, name: str = "") -> Any:
        try:
            raise RuntimeError("CUDA error: device-side assert triggered")
        except RuntimeError as error:
            raise ModelError("the draft cannot be loaded") from error

    swaps = DraftSwapQueue(load)
    swaps.begin(asked(1, "file:///a"))
    with pytest.raises(ModelError, match="cannot be loaded"):
        wait(swaps)
    swaps.close()
