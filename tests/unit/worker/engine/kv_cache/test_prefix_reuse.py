"""Prefix reuse: the blocks that an arriving request finds and leaves, and the keys that its draft may continue from."""

from __future__ import annotations

import pytest
from device import Device, text_of
from small_engine import submit

from specdecode_worker.engine.drafts.draft_progress import DraftProgress
from specdecode_worker.engine.kv_cache.block_pool import BLOCK_SIZE
from specdecode_worker.engine.request import Request
from specdecode_worker.engine.scheduler import Limits, Row

PROMPT = [*range(60)]


def device(**fields: object) -> Device:
    return Device(**{"limits": Limits(4, 200), "blocks": 60, **fields})  # type: ignore[arg-type]


def chunks(rows: list[Row]) -> list[tuple[str, int, int]]:
    return [(row.request.id, row.start, row.count) for row in rows if row.is_chunk]


def served(machine: Device, prompt: list[int] = PROMPT, new: int = 4, name: str = "first") -> Request:
    one = machine.arrive(name, prompt, new)
    machine.drain()
    return one


@pytest.mark.parametrize(
    ("prompt", "hit"),
    [
        (PROMPT, 48),
        (PROMPT[:50], 48),
        (PROMPT[:49], 48),
        (PROMPT[:48], 32),  # the last token is recomputed for its logits
        (PROMPT[:16], 0),
        (PROMPT[:40] + [99] * 20, 32),
        ([99, *PROMPT[1:]], 0),
    ],
)
def test_whole_blocks_of_a_known_beginning_are_not_computed_again(prompt: list[int], hit: int) -> None:
    machine = device()
    served(machine)
    second = machine.arrive("second", prompt)
    assert chunks(machine.step()) == [("second", hit, len(prompt) - hit)]
    assert (second.cached_tokens, second.cached, second.draft.start) == (hit, len(prompt), 1 if hit == 0 else hit)
    counters = machine.scheduler.counters
    assert (counters.prefix_query_tokens, counters.prefix_hit_tokens) == (60 + len(prompt), hit)


def test_another_turn_finds_the_answer_too() -> None:
    machine = device()
    first = served(machine, new=30)
    second = machine.arrive("second", [*first.tokens, 7, 7])
    machine.step()
    # The last token was emitted but never processed, so its key is not in the cache.
    assert second.cached_tokens == (90 - 1) // BLOCK_SIZE * BLOCK_SIZE == 80


def test_live_requests_share() -> None:
    machine = device()
    first = machine.arrive("first", PROMPT)
    machine.step()
    second = machine.arrive("second", PROMPT)
    machine.step()
    assert first.blocks[:3] == second.blocks[:3]
    assert first.blocks[3] != second.blocks[3], "what is written to is nobody else's"
    assert machine.pool.used == 5


def test_requests_that_come_together_wait_a_step_for_the_first() -> None:
    machine = device()
    for name in "abcd":
        machine.arrive(name, PROMPT)
    assert chunks(machine.step()) == [("a", 0, 60)]
    assert chunks(machine.step()) == [("b", 48, 12), ("c", 48, 12), ("d", 48, 12)]


def test_what_nobody_computes_is_not_waited_for() -> None:
    machine = device()
    machine.arrive("a", PROMPT[:16])
    machine.arrive("b", PROMPT[:16])
    machine.arrive("c", [99, *PROMPT])
    assert [name for name, *_ in chunks(machine.step())] == ["a", "b", "c"]


def test_a_preempted_request_finds_its_own_blocks_again() -> None:
    """A preempted request finds its own blocks in the prefix cache.

    Only the one block that was missing at the preemption has been taken meanwhile.
    """
    machine = device(blocks=1 + 8)
    old = machine.arrive("old", [1] * 30, new=30)
    young = machine.arrive("young", PROMPT, new=30)
    for _ in range(40):
        machine.step()
        if young.epoch:
            break
    assert young.epoch == 1
    old.finish = "abort"
    machine.scheduler.release(old)
    said = len(young.tokens)
    rows = machine.step()
    assert chunks(rows) == [("young", young.prefix, said - young.prefix)]
    assert young.prefix >= 48
    assert young.cached_tokens == 0, "of its prompt nothing had been cached when it came"


def test_prompt_logprobs_reuse_nothing() -> None:
    machine = device()
    served(machine)
    asks = machine.arrive("asks", PROMPT, prompt_logprobs=1)
    assert chunks(machine.step()) == [("asks", 0, 60)]
    assert asks.cached_tokens == 0
    assert machine.scheduler.counters.prefix_hit_tokens == 0


def test_switched_off_nothing_is_kept() -> None:
    machine = device(caching=False)
    served(machine)
    assert (machine.pool.cached, machine.pool.free) == (0, 59)
    second = served(machine, name="second")
    assert second.cached_tokens == 0
    assert machine.scheduler.counters.prefix_query_tokens == 0


def test_each_block_is_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from specdecode_worker.engine.kv_cache import prefix_index

    made: list[bytes] = []

    def counting(data: bytes, **sizes: int) -> object:
        made.append(data)
        return blake2b(data, **sizes)

    blake2b = prefix_index.blake2b
    machine = device(limits=Limits(2, 16))
    monkeypatch.setattr(prefix_index, "blake2b", counting)
    one = served(machine, new=60)
    assert len(made) == len(set(made)) == len(one.digests) == (60 + 60 - 1) // BLOCK_SIZE


class Drafting:
    """A request of four chunks with a draft progress set by the test after the second one, and a later request."""

    def __init__(self, **progress: int) -> None:
        self.machine = device(limits=Limits(4, 16))
        self.first = self.machine.arrive("first", PROMPT)
        self.first.draft = DraftProgress("d")
        for step in range(4):
            self.machine.step()
            if step == 1:
                for name, value in progress.items():
                    setattr(self.first.draft, name, value)

    def second(self, draft: str = "d") -> Request:
        self.first.finish = "abort"
        self.machine.scheduler.release(self.first)
        one = self.machine.arrive("second", PROMPT)
        one.draft = DraftProgress(draft)
        self.machine.step()
        return one


def test_the_draft_goes_on_where_its_keys_are_valid() -> None:
    """The draft continues where its keys are valid.

    A draft that follows its target lags by one slot; the slots before are in the same blocks.
    """
    second = Drafting().second()
    assert (second.prefix, second.draft.start, second.draft.lag, second.draft.features_from) == (48, 1, 1, 47)


def test_the_draft_sees_nothing_of_a_prefix_that_another_wrote() -> None:
    second = Drafting().second("other")
    assert (second.prefix, second.draft.start, second.draft.features_from) == (48, 48, 47)


def test_blocks_before_a_gap_are_hidden_from_the_draft() -> None:
    drafting = Drafting()
    blocks = drafting.first.blocks
    index = drafting.machine.pool.prefixes
    index.forget_marks("d")
    for block in (blocks[0], blocks[2]):
        index.mark(block, "d")
    second = drafting.second()
    assert (second.prefix, second.draft.start) == (48, 32)


def test_a_block_that_the_draft_had_not_reached_is_computed_again_rather_than_all_before_it_lost() -> None:
    """A block that the draft had not reached is recomputed, and the blocks before it are reused.

    The first request's draft is 14 slots behind when it ends, as after a rejected tree.
    """
    drafting = Drafting(lag=14)
    assert drafting.first.drafted == 47, "one short of the third block's end"
    second = drafting.second()
    assert (second.prefix, second.draft.start) == (32, 1)
    third = drafting.machine.arrive("third", PROMPT)
    third.draft = DraftProgress("d")
    drafting.machine.step()
    drafting.machine.step()
    assert (third.prefix, third.draft.start) == (48, 1), "the better copy is the one that is known"


def test_what_no_draft_has_followed_is_computed_again_once_drafts_follow() -> None:
    """A prefix that no draft has processed is recomputed once drafting is on.

    Otherwise it would be hidden from drafts for as long as it is cached.
    """
    machine = device()
    served(machine, name="plain")
    scheduler = machine.scheduler
    scheduler.drafts_follow(True)
    first, second = (machine.arrive(name, PROMPT) for name in ("first", "second"))
    for one in (first, second):
        one.draft = DraftProgress("d")
    machine.step()
    assert first.prefix == 0
    scheduler.drafts_follow(False)
    third = machine.arrive("third", PROMPT)
    third.draft = DraftProgress("d")
    machine.step()
    assert third.prefix == 48, "while nothing is drafted, anything will do"


def test_a_swapped_draft_sees_nothing_of_what_stood_there() -> None:
    drafting = Drafting()
    drafting.machine.scheduler.forget_draft("d", states=False)
    second = drafting.second()
    assert (second.prefix, second.draft.start, second.draft.features_from) == (48, 48, 47)


def test_a_draft_that_reads_other_states_begins_a_slot_later() -> None:
    """A draft that reads other hidden states starts one slot later.

    Slot 48 needs the state of position 47, which was stored for the previous draft.
    """
    drafting = Drafting()
    drafting.machine.scheduler.forget_draft("d", states=True)
    second = drafting.second()
    assert (second.prefix, second.draft.start, second.draft.features_from) == (48, 49, 49)


def test_a_request_knows_how_far_its_draft_has_come() -> None:
    one = Request.of(submit(), (), arrived_seconds=0)
    one.cached = 12
    one.draft.lag = 2
    assert one.drafted == 11, "slots up to 10"
    one.in_flight.append(4)
    one.draft.launched(4)
    assert one.drafted == 11
    one.draft.reached_root(len(one.in_flight))
    assert one.drafted == 13, "at least: the step in flight commits one or more"
    one.in_flight.append(4)
    one.draft.launched(4)
    one.advance(4, 3)
    assert (one.cached, one.drafted) == (15, 16)


def test_a_prefix_bounds_what_the_draft_writes() -> None:
    """The draft never writes into a reused prefix.

    While steps are in flight the host overestimates the lag, which must not reach back into shared blocks.
    """
    one = Request.of(submit(prompt=range(40)), (), arrived_seconds=0)
    one.prefix = one.cached = 32
    one.in_flight.extend([8, 7])
    one.draft.lag = 8
    assert one.cached_least + 1 - one.unseen(1) == 32
    one.prefix = 0
    assert one.unseen(1) == 8


def test_the_device_model_tells_prompts_apart() -> None:
    """The simulated device distinguishes prompts, which the tests above depend on."""
    assert text_of([1, 2], 5) == text_of([1, 2], 5) != text_of([1, 3], 5)
