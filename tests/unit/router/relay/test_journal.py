"""Journal: every token once and in order, and all that another worker needs."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

import msgspec
import pytest

from specdecode_router.errors import WorkerFailed
from specdecode_router.relay import journal as module
from specdecode_router.relay.journal import Journal
from specdecode_worker.contract.internal_stream import ChoiceCounters, ChoiceProgress, ChoiceStart, Open, Step

OPEN = Open(
    compatibility_key="k",
    prompts=((1, 2),),
    choices=(ChoiceStart(prompt=0, sampling=b"a"), ChoiceStart(prompt=0, sampling=b"b")),
    created=1,
    stream=True,
    opening=b"o",
)


def memory_of(work: Callable[[], object]) -> int:
    """Return the bytes that some work leaves allocated."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


def step(index: int, *ids: int, choice: int = 0, **fields: object) -> Step:
    return msgspec.convert({"choice": choice, "index": index, "ids": ids, "counters": [0, 0, []], **fields}, Step)


def test_only_the_next_token_is_taken() -> None:
    journal = Journal(OPEN)
    assert journal.add(step(0, 5, 6))
    assert not journal.add(step(0, 5, 6))
    assert not journal.add(step(1, 6, 7))
    assert journal.add(step(2, 7))
    assert journal.add(step(0, 9, choice=1)), "choices have indices of their own"
    assert [choice.ids for choice in journal.resume().choices] == [(5, 6, 7), (9,)]
    assert journal.tokens == 4


@pytest.mark.parametrize("bad", [step(1, 5), step(0, 5, choice=2), step(0, 5, choice=-1), step(0, -1), step(0, 2**32)])
def test_steps_that_break_the_contract(bad: Step) -> None:
    journal = Journal(OPEN)
    with pytest.raises(WorkerFailed):
        journal.add(bad)


def test_progress_has_log_probabilities_and_the_last_counters() -> None:
    journal = Journal(OPEN)
    one, two = (-0.5, 1, (3,), (-0.5,)), (-0.25, 2, (4,), (-0.1,))
    journal.add(step(0, 3, logprobs=[one], prompt_logprobs=[two], counters=[8, 2, [0, 1]]))
    journal.add(step(1, 4, logprobs=[two], counters=[8, 4, [1, 0, 0, 1]]))
    assert journal.resume().choices[0] == ChoiceProgress(
        ids=(3, 4), logprobs=(one, two), prompt_logprobs=(two,), counters=ChoiceCounters(8, 4, (1, 0, 0, 1))
    )
    assert journal.resume().open == OPEN


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_TOKENS", 10)
    journal = Journal(OPEN)
    for index in range(10):
        assert journal.add(step(index, 1))
    with pytest.raises(WorkerFailed):
        journal.add(step(10, 1))
    assert len(journal.resume().choices[0].ids) == 10


def test_log_probabilities_take_little_memory() -> None:
    journal = Journal(OPEN)
    one = (-0.5, 1, tuple(range(100_000, 100_020)), tuple(-0.5 - rank for rank in range(20)))
    frames = [msgspec.msgpack.encode(step(index, 3, logprobs=[one])) for index in range(1000)]

    def add() -> None:
        for frame in frames:
            journal.add(msgspec.msgpack.decode(frame, type=Step))

    assert memory_of(add) < 500_000
    assert journal.resume().choices[0].logprobs == (one,) * 1000


def test_a_prompt_takes_four_bytes_a_token() -> None:
    opened = msgspec.structs.replace(OPEN, prompts=(tuple(range(1000, 101_000)),))
    frame = msgspec.msgpack.encode(opened)
    journals: list[Journal] = []
    assert memory_of(lambda: journals.append(Journal(msgspec.msgpack.decode(frame, type=Open)))) < 500_000
    assert journals[0].resume().open == opened
    assert journals[0].prompt_tokens == 200_000


def test_a_prompt_with_an_id_that_is_no_token() -> None:
    with pytest.raises(WorkerFailed):
        Journal(msgspec.structs.replace(OPEN, prompts=((1, 2**32),)))
