"""Draft swaps: in order, without blocking, and with the reason for every draft that cannot be loaded."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specdecode_worker.contract import DraftConfig, DraftState, ModelConfig, WorkerConfig
from specdecode_worker.core.messages import SetDraft, Shutdown
from specdecode_worker.drafts.swap import MAX_DRAFTS, DraftSwap, DraftSwapQueue
from specdecode_worker.engine.process import EngineLoop, HeartbeatBlock, HeartbeatWriter
from specdecode_worker.models.errors import ModelError


def asked(uri: str, name: str = "", expected_hash: str = "") -> SetDraft:
    return SetDraft(1, DraftConfig(method="eagle3", uri=uri).model_dump_json().encode(), name, expected_hash)


def wait(swaps: DraftSwapQueue) -> list[DraftSwap]:
    finished: list[DraftSwap] = []
    deadline = time.monotonic() + 10
    while swaps.pending:
        assert time.monotonic() < deadline
        finished += swaps.finished()
    return finished


def loaded(uri: str | None) -> Any:
    return SimpleNamespace(state=SimpleNamespace(hash=f"of {uri}"))


class Loader:
    """Loader that waits for ``gate`` and records the URIs. A URI among ``errors`` raises."""

    def __init__(self, errors: dict[str, BaseException] | None = None, *, is_open: bool = True) -> None:
        self.gate = threading.Event()
        self.uris: list[str | None] = []
        self._errors = errors or {}
        if is_open:
            self.gate.set()

    def __call__(self, config: DraftConfig, name: str = "") -> Any:
        self.uris.append(config.uri)
        self.gate.wait(10)
        if (error := self._errors.get(config.uri or "")) is not None:
            raise error
        return loaded(config.uri)


def test_drafts_load_in_the_background_and_finish_in_order() -> None:
    load = Loader(is_open=False)
    swaps = DraftSwapQueue(load, clock=lambda: 7.0)
    swaps.begin(asked("file:///a", expected_hash="of file:///a"))
    swaps.begin(asked("file:///b", "code"))
    assert swaps.pending
    assert list(swaps.finished()) == []
    pending = swaps.status()[""].pending
    assert (pending.uri, pending.hash, pending.since_seconds) == ("file:///a", "of file:///a", 7.0)
    load.gate.set()
    assert [(swap.name, swap.loaded) for swap in wait(swaps)] == [
        ("", loaded("file:///a")),
        ("code", loaded("file:///b")),
    ]
    assert swaps.status() == {}
    swaps.close()


def test_a_new_request_replaces_the_pending_one_of_its_name() -> None:
    load = Loader(is_open=False)
    swaps = DraftSwapQueue(load)
    for uri in ("file:///a", "file:///b", "file:///c"):
        swaps.begin(asked(uri))
    swaps.begin(asked("file:///d", "code"))
    load.gate.set()
    assert [swap.loaded for swap in wait(swaps)] == [loaded("file:///c"), loaded("file:///d")]
    assert "file:///b" not in load.uris, "it waited, so it was never loaded"


FAILURES: dict[str, BaseException] = {
    "fc.weight is missing": ModelError("fc.weight is missing"),
    "/d/config.json cannot be read: Permission denied": PermissionError(13, "Permission denied", "/d/config.json"),
    "file:///bad is not complete in the model cache": OSError(30, "Read-only file system", "/cache/x.lock"),
    "file:///bad cannot be loaded (RecursionError: too deep)": RecursionError("too deep"),
    "file:///bad: there is too little memory": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
    "lower kv_cache_tokens": RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
    "file:///bad cannot be loaded (PanicException: a panic)": type("PanicException", (BaseException,), {})("a panic"),
    "file:///bad cannot be loaded (ZeroDivisionError: )": ZeroDivisionError(),
}


@pytest.mark.parametrize("reason", FAILURES)
def test_a_draft_that_fails_in_any_way_is_reported_and_the_next_one_loads(reason: str) -> None:
    swaps = DraftSwapQueue(Loader({"file:///bad": FAILURES[reason]}))
    swaps.begin(asked("file:///bad", "code"))
    swaps.begin(asked("file:///good"))
    bad, good = wait(swaps)
    assert (bad.loaded, good.loaded) == (None, loaded("file:///good"))
    assert reason in bad.problem
    assert [(name, status.problem) for name, status in swaps.status().items()] == [("code", bad.problem)]
    swaps.begin(asked("file:///good", "code"))
    assert swaps.status()["code"].problem is None, "a new request clears it"
    wait(swaps)


BROKEN = RuntimeError("CUDA error: device-side assert triggered")
TRANSLATED = ModelError("the draft cannot be loaded")
TRANSLATED.__cause__ = BROKEN


@pytest.mark.parametrize("error", [BROKEN, TRANSLATED], ids=["as it is", "behind a model error"])
def test_a_device_that_does_not_work_any_more_ends_the_engine(error: Exception) -> None:
    swaps = DraftSwapQueue(Loader({"file:///a": error}))
    swaps.begin(asked("file:///a"))
    with pytest.raises(type(error), match=str(error)):
        wait(swaps)
    swaps.close()


def test_files_that_change_while_they_are_loaded_are_reported() -> None:
    swaps = DraftSwapQueue(Loader())
    swaps.begin(asked("file:///a", expected_hash="another"))
    assert "its files changed" in wait(swaps)[0].problem


def test_a_swap_that_cannot_be_tried_is_refused() -> None:
    swaps = DraftSwapQueue(Loader())
    with pytest.raises(ModelError, match=r"draft\.uri is needed"):
        swaps.begin(SetDraft(2, b"{}"))
    with pytest.raises(ModelError, match="method none is no draft"):
        swaps.begin(SetDraft(3, b'{"method": "none"}'))
    with pytest.raises(ModelError, match="cannot load"):
        DraftSwapQueue(None).begin(asked("file:///a"))
    assert not swaps.pending


def test_the_number_of_names_is_bounded() -> None:
    swaps = DraftSwapQueue(Loader({"file:///bad": ModelError("no")}))
    for number in range(3 * MAX_DRAFTS):
        swaps.begin(asked("file:///bad", f"name-{number}"), in_use=("", "code"))
        wait(swaps)
        assert len({"", "code", *swaps.status()}) <= MAX_DRAFTS
    assert f"name-{3 * MAX_DRAFTS - 1}" in swaps.status(), "the newest problem is kept"
    with pytest.raises(ModelError, match="at most 8 drafts"):
        swaps.begin(asked("file:///a", "more"), in_use=[f"n{number}" for number in range(7)])


class Draft:
    """Loaded draft that tests can refer to weakly."""

    state = SimpleNamespace(hash="of file:///a")


class RefusingEngine:
    """Idle engine that loads one draft and has no room for it. The loop ends at the next look at its messages."""

    idle, draft_names, draft = True, (), DraftState()

    def __init__(self) -> None:
        self.loaded: weakref.ref[Draft] | None = None
        self.refused = self.kept = False
        self._messages: list[Any] = [asked("file:///a")]

    def load_draft(self, config: DraftConfig, name: str = "") -> Draft:
        draft = Draft()
        self.loaded = weakref.ref(draft)
        return draft

    def set_draft(self, name: str, loaded: Draft) -> None:
        self.refused = True
        raise ModelError("there is too little memory for its states")

    def receive(self, timeout_seconds: float) -> list[Any]:
        if self.refused and self.loaded is not None:
            gc.collect()
            self.kept = self.loaded() is not None
            return [Shutdown()]
        time.sleep(0.001)
        messages, self._messages = self._messages, []
        return messages

    def send(self, messages: list[Any]) -> None:
        pass


def test_the_loop_keeps_no_draft_that_does_not_run() -> None:
    """On a GPU its memory would be missing for the next attempt."""
    config = WorkerConfig(model=ModelConfig(uri="file:///target", served_name="target"))
    engine: Any = RefusingEngine()
    EngineLoop(engine, engine, HeartbeatWriter(HeartbeatBlock()), config).run()
    assert engine.refused
    assert not engine.kept
