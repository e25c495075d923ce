"""Prefix reuse: the blocks that an arriving request finds and leaves, and the keys that its draft may continue from."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdecode_worker.core.kv_cache import BLOCK_SIZE, PrefixIndex
from specdecode_worker.core.request import DraftProgress, Request, Row
from specdecode_worker.engine.scheduler import Limits
from specdecode_worker.sampling.trees import PLAIN
from support.worker.accounts import check_blocks
from support.worker.device import SimulatedDevice
from support.worker.small_engine import submit

PROMPT = [*range(60)]


def device(**fields: object) -> SimulatedDevice:
    return SimulatedDevice(**{"limits": Limits(4, 200), "blocks": 60, **fields})  # type: ignore[arg-type]


def chunks(rows: list[Row]) -> list[tuple[str, int, int]]:
    return [(row.request.id, row.start, row.count) for row in rows if row.is_chunk]


def served(simulated: SimulatedDevice, new: int = 4, name: str = "first") -> Request:
    one = simulated.arrive(name, PROMPT, new)
    simulated.drain()
    return one


def arrive_with_draft(simulated: SimulatedDevice, name: str, draft: str, new: int = 30) -> Request:
    one = simulated.arrive(name, PROMPT, new)
    one.draft = DraftProgress(draft)
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
def test_full_blocks_of_a_cached_prefix_are_reused(prompt: list[int], hit: int) -> None:
    simulated = device()
    served(simulated)
    second = simulated.arrive("second", prompt)
    assert chunks(simulated.step()) == [("second", hit, len(prompt) - hit)]
    assert (second.cached_tokens, second.cached, second.draft.start) == (hit, len(prompt), 1 if hit == 0 else hit)
    counters = simulated.scheduler.counters
    assert (counters.prefix_query_tokens, counters.prefix_hit_tokens) == (60 + len(prompt), hit)


def test_simultaneous_requests_wait_one_step_for_the_first_to_fill_the_prefix() -> None:
    simulated = device()
    for name in "abcd":
        simulated.arrive(name, PROMPT)
    assert chunks(simulated.step()) == [("a", 0, 60)]
    assert chunks(simulated.step()) == [("b", 48, 12), ("c", 48, 12), ("d", 48, 12)]


def test_requests_do_not_wait_for_blocks_that_no_request_fills() -> None:
    simulated = device()
    simulated.arrive("a", PROMPT[:16])
    simulated.arrive("b", PROMPT[:16])
    simulated.arrive("c", [99, *PROMPT])
    assert [name for name, *_ in chunks(simulated.step())] == ["a", "b", "c"]


def test_a_preempted_request_reuses_its_own_blocks() -> None:
    """Others have taken only the one block that was missing at the preemption."""
    simulated = device(blocks=1 + 8)
    old = simulated.arrive("old", [1] * 30, new=30)
    young = simulated.arrive("young", PROMPT, new=30)
    for _ in range(40):
        simulated.step()
        if young.epoch:
            break
    assert young.epoch == 1
    old.finish = "abort"
    simulated.scheduler.release(old)
    said = len(young.tokens)
    rows = simulated.step()
    assert chunks(rows) == [("young", young.prefix, said - young.prefix)]
    assert young.prefix >= 48
    assert young.cached_tokens == 0, "of its prompt nothing had been cached when it came"


def test_prompt_logprobs_reuse_nothing() -> None:
    simulated = device()
    served(simulated)
    asks = simulated.arrive("asks", PROMPT, prompt_logprobs=1)
    assert chunks(simulated.step()) == [("asks", 0, 60)]
    assert asks.cached_tokens == 0
    assert simulated.scheduler.counters.prefix_hit_tokens == 0


@pytest.mark.parametrize(
    ("first", "second", "hit"), [("", "", 48), ("a", "a", 48), ("a", "b", 0), ("a", "", 0), ("", "a", 0)]
)
def test_requests_with_different_salts_share_no_block(first: str, second: str, hit: int) -> None:
    simulated = device()
    for name, salt in (("first", first), ("second", second)):
        one = simulated.arrive(name, PROMPT, 4, cache_salt=salt)
        simulated.drain()
    assert one.cached_tokens == hit


def test_simultaneous_requests_with_different_salts_do_not_wait_for_each_other() -> None:
    simulated = device()
    for name in "ab":
        simulated.arrive(name, PROMPT, cache_salt=name)
    assert chunks(simulated.step()) == [("a", 0, 60), ("b", 0, 60)]


def test_each_block_is_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from specdecode_worker.core import kv_cache as prefix_index

    made: list[bytes] = []

    def counting(data: bytes, **sizes: int) -> object:
        made.append(data)
        return blake2b(data, **sizes)

    blake2b = prefix_index.blake2b
    simulated = device(limits=Limits(2, 16))
    monkeypatch.setattr(prefix_index, "blake2b", counting)
    one = served(simulated, new=60)
    assert len(made) == len(set(made)) == len(one.digests) == (60 + 60 - 1) // BLOCK_SIZE


class Drafting:
    """A request of four chunks with a draft progress set by the test after the second one, and a later request."""

    def __init__(self, **progress: int) -> None:
        self.simulated = device(limits=Limits(4, 16))
        self.first = arrive_with_draft(self.simulated, "first", "d")
        for step in range(4):
            self.simulated.step()
            if step == 1:
                for name, value in progress.items():
                    setattr(self.first.draft, name, value)

    def second(self, draft: str = "d") -> Request:
        self.first.finish = "abort"
        self.simulated.scheduler.release(self.first)
        one = arrive_with_draft(self.simulated, "second", draft)
        self.simulated.step()
        return one


@pytest.mark.parametrize(
    ("states", "draft", "start", "features_from"),
    [(None, "d", 1, 47), (None, "other", 48, 47), (False, "d", 48, 47), (True, "d", 49, 49)],
    ids=["its own keys", "keys of another draft", "keys of its predecessor", "states of its predecessor"],
)
def test_the_draft_continues_where_its_keys_are_valid(
    states: bool | None, draft: str, start: int, features_from: int
) -> None:
    """A draft that follows its target lags by one slot; the slots before are in the same blocks.

    A draft that was swapped in and reads other hidden states starts one slot later than others: slot 48 needs the state
    of position 47, which was stored for the previous draft.
    """
    drafting = Drafting()
    if states is not None:
        drafting.simulated.scheduler.reuse.forget("d", states=states)
    second = drafting.second(draft)
    assert (second.prefix, second.draft.start, second.draft.features_from) == (48, start, features_from)
    assert second.draft.lag == 1 or start > 1


def test_blocks_before_a_gap_are_hidden_from_the_draft() -> None:
    drafting = Drafting()
    blocks = drafting.first.blocks
    index = drafting.simulated.pool.prefixes
    index.forget_marks("d")
    for block in (blocks[0], blocks[2]):
        index.mark(block, "d")
    second = drafting.second()
    assert (second.prefix, second.draft.start) == (48, 32)


def test_a_block_that_the_draft_had_not_reached_is_recomputed_and_earlier_blocks_are_reused() -> None:
    """The first request's draft is 14 slots behind when it ends, as after a rejected tree."""
    drafting = Drafting(lag=14)
    assert drafting.first.drafted == 47, "one short of the third block's end"
    second = drafting.second()
    assert (second.prefix, second.draft.start) == (32, 1)
    third = arrive_with_draft(drafting.simulated, "third", "d")
    drafting.simulated.step()
    drafting.simulated.step()
    assert (third.prefix, third.draft.start) == (48, 1), "the better copy is the one that is known"


def test_a_prefix_without_draft_keys_is_recomputed_once_draft_prefill_is_on() -> None:
    """A prefix that was not recomputed would be hidden from drafts for as long as it is cached."""
    simulated = device()
    served(simulated, name="plain")
    scheduler = simulated.scheduler
    scheduler.reuse.draft_prefill = True
    first, _ = (arrive_with_draft(simulated, name, "d") for name in ("first", "second"))
    simulated.step()
    assert first.prefix == 0
    scheduler.reuse.draft_prefill = False
    third = arrive_with_draft(simulated, "third", "d")
    simulated.step()
    assert third.prefix == 48, "while nothing is drafted, anything will do"


@pytest.mark.parametrize("owned", [False, True], ids=["cached", "in use"])
def test_every_fourth_request_computes_a_prefix_without_keys_of_its_draft_once_more(owned: bool) -> None:
    simulated = device()
    simulated.scheduler.reuse.draft_prefill = True
    first = arrive_with_draft(simulated, "first", "old", new=40 if owned else 4)
    simulated.step()
    if not owned:
        simulated.drain()
    reused = []
    for number in range(5):
        one = arrive_with_draft(simulated, f"{number}", "new", 4)
        simulated.step()
        simulated.step()
        reused.append((one.prefix, one.draft.start))
    assert reused == [(48, 48)] * 3 + [(0, 1), (48, 1)], "the fifth one's draft sees what the fourth one computed"
    simulated.drain()
    check_blocks(simulated.pool, [])
    assert first.finish is not None


def test_a_request_that_waits_keeps_its_choice() -> None:
    simulated = device(limits=Limits(1, 200))
    simulated.scheduler.reuse.draft_prefill = True
    arrive_with_draft(simulated, "first", "old", new=4)
    simulated.drain()
    waiting = [arrive_with_draft(simulated, f"{number}", "new", 4) for number in range(3)]
    for _ in range(3):
        simulated.drain()
    assert [one.prefix for one in waiting] == [48, 48, 48], "a lookup while it waits counts no further request"


@pytest.mark.parametrize("cached", [False, True], ids=["unknown", "cached"])
def test_a_request_that_cannot_be_admitted_is_looked_up_once(cached: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    simulated = device(blocks=12, trees=[PLAIN], random=Random(0))
    if cached:
        served(simulated, name="before")
    simulated.arrive("running", [99] * 60, 80)
    simulated.step()
    waiting = simulated.arrive("waiting", PROMPT + [7] * 80, 4)
    simulated.step()
    found: list[int] = []
    find = PrefixIndex.find
    monkeypatch.setattr(PrefixIndex, "find", lambda self, digests: (found.append(1), find(self, digests))[1])
    for _ in range(40):  # in which the running request publishes blocks of its own, and none is evicted
        simulated.step()
    assert waiting.slot < 0
    assert not found
    simulated.drain()
    assert waiting.finish is not None


def play(seed: int) -> int:
    """Serve requests at random, with several drafts and salts, and compare each hit of waiting ones with a search.

    Return the number of hits that were found without a search.
    """
    random = Random(seed)
    simulated = device(blocks=random.randint(8, 14), limits=Limits(2, 64), random=random, trees=[PLAIN])
    scheduler, kept = simulated.scheduler, 0
    reuse, index = scheduler.reuse, simulated.pool.prefixes
    for number in range(60):
        match random.choice(("arrive", "step", "step", "swap", "forget", "prefill", "abort", "mark")):
            case "arrive" if len(scheduler.waiting) < 4:
                prompt = [token for token in random.choices((1, 1, 2), k=random.randint(1, 5)) for _ in range(16)]
                one = simulated.arrive(
                    str(number), [*prompt, 3], random.randint(1, 40), cache_salt=random.choice(("", "", "", "s"))
                )
                one.draft = DraftProgress(random.choice(("d", "d", "e")))
            case "step" if not scheduler.idle or simulated.launched:
                simulated.step()
            case "swap" if random.random() < 0.3:
                for one in [*scheduler.waiting, *scheduler.running]:
                    one.draft.draft = random.choice(("d", "e"))
            case "forget" if random.random() < 0.3:
                scheduler.reuse.forget(random.choice(("d", "e")), states=random.random() < 0.5)
            case "prefill" if random.random() < 0.3:
                scheduler.reuse.draft_prefill = random.random() < 0.5
            case "mark" if index._entries:  # as by a draft that has caught up
                index.mark(random.choice(sorted(index._entries)), random.choice(("d", "e", "followed", "states")))
            case "abort" if scheduler.running and random.random() < 0.3:
                one = random.choice(scheduler.running)
                one.finish = "abort"
                scheduler.release(one)
        for waits in list(scheduler.waiting)[:2]:
            before = reuse._known.get(waits)
            hit = reuse.find_next(waits)
            kept += before is not None and before is reuse._known.get(waits)
            assert hit == reuse.find(waits), "the hit is stale"
    return kept


@given(st.integers(0, 10**9))
def test_a_hit_is_never_stale(seed: int) -> None:
    play(seed)


def test_hits_are_kept_in_the_test_above() -> None:
    assert sum(map(play, range(20))) > 100


def test_the_draft_never_writes_into_a_reused_prefix() -> None:
    """While steps are in flight the host overestimates the lag, which must not reach back into shared blocks."""
    one = Request.of(submit(prompt=range(40)), (), arrived_seconds=0)
    one.prefix = one.cached = 32
    one.in_flight.extend([8, 7])
    one.draft.lag = 8
    assert one.cached_min + 1 - one.draft_backlog(1, one.draft) == 32
    one.prefix = 0
    assert one.draft_backlog(1, one.draft) == 8
