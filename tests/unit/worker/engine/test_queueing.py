"""Waiting requests: their order, their deadlines, and the division of the prompt budget among them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from specdecode_worker.core.messages import Submit
from specdecode_worker.core.request import Request
from specdecode_worker.engine.scheduler import (
    OUTPUT_COST,
    SHORT_PROMPT_TOKENS,
    STEP_SECONDS,
    Deadlines,
    PrefillLimit,
    WaitingQueue,
    share_prompt_budget,
    short_prompt_tokens,
)
from specdecode_worker.sampling.params import Sampling

SHORT = 10


def waiting(queue: WaitingQueue, order: int, tokens: int, client: str = "", weight: float = 1.0) -> Request:
    """Add a request with ``tokens`` tokens to prefill."""
    sampling = Sampling(max_tokens=1, seed=0)
    submit = Submit(request_id=str(order), prompt=(1,), sampling=sampling, client=client, weight=weight)
    one = Request.of(submit, (), arrived_seconds=0)
    one.order, one.expected_prefill = order, tokens
    queue.add(one)
    return one


def served(queue: WaitingQueue, most: int = 10**6, emitted: int = 0) -> list[int]:
    """Admit and end up to ``most`` requests, one after the other. Return their order of arrival."""
    orders = []
    while len(orders) < most and (one := queue.first()) is not None:
        queue.admit(one)
        one.emitted = emitted
        queue.charge_output(one)
        orders.append(one.order)
    return orders


def test_tokens_are_divided_by_the_weight() -> None:
    queue = WaitingQueue(SHORT)
    for order in range(0, 80, 2):
        waiting(queue, order, 5, "heavy", weight=3)
        waiting(queue, order + 1, 5, "light")
    heavy = [order for order in served(queue, 40, emitted=7) if order % 2 == 0]
    assert 29 <= len(heavy) <= 31


def test_clients_take_turns() -> None:
    queue = WaitingQueue(SHORT)
    for order in range(6):
        waiting(queue, order, 5, "flood")
    waiting(queue, 6, 5, "quiet")
    waiting(queue, 7, 5, "quiet")
    assert served(queue) == [0, 6, 1, 7, 2, 3, 4, 5]


def test_a_client_pays_for_its_tokens() -> None:
    queue = WaitingQueue(SHORT)
    for order in range(3):
        waiting(queue, order, 30, "long")
    for order in range(3, 12):
        waiting(queue, order, 10, "short")
    assert served(queue) == [0, 3, 4, 5, 1, 6, 7, 8, 2, 9, 10, 11]


def test_output_counts() -> None:
    queue = WaitingQueue(SHORT)
    one = waiting(queue, 0, 5, "talks")
    queue.admit(one)
    one.emitted = 20
    queue.charge_output(one)
    waiting(queue, 1, 5, "talks")
    for order in range(2, 12):
        waiting(queue, order, 5, "listens")
    turns = served(queue, 10)
    assert turns.index(1) == (5 + 20 * OUTPUT_COST) // 5


def test_an_absent_client_saves_up_no_turns() -> None:
    queue = WaitingQueue(SHORT)
    for order in range(20):
        waiting(queue, order, 5, "busy")
    served(queue, 10)
    for order in range(20, 25):
        waiting(queue, order, 5, "new")
    assert sorted(served(queue, 4)) == [10, 11, 20, 21]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 20)), min_size=1, max_size=30))
def test_every_request_is_served_once(arrivals: list[tuple[str, int]]) -> None:
    queue = WaitingQueue(SHORT)
    for order, (client, tokens) in enumerate(arrivals):
        waiting(queue, order, tokens, client)
    assert queue.short_tokens == sum(tokens for _, tokens in arrivals if tokens <= SHORT)
    assert sorted(one.order for one in queue) == list(range(len(arrivals)))
    orders = served(queue, emitted=3)
    assert sorted(orders) == list(range(len(arrivals)))
    assert (len(queue), queue.short_tokens, list(queue)) == (0, 0, [])
    for client in "abc":
        own = [order for order, (name, _) in enumerate(arrivals) if name == client]
        assert [order for order in orders if order in own] == own, "first come, first served within a client"


def test_preempted_requests_come_first_and_are_charged_once() -> None:
    queue = WaitingQueue(SHORT)
    one, other = waiting(queue, 0, 5, "a"), waiting(queue, 1, 5, "b")
    queue.admit(one)
    one.epoch = 1
    queue.add(one)
    assert queue.first() is one
    queue.admit(one)
    waiting(queue, 2, 5, "a")
    assert queue.first() is other


def test_a_request_that_does_not_wait_is_not_removed() -> None:
    queue = WaitingQueue(SHORT)
    one = waiting(queue, 0, 5)
    for _ in range(2):
        queue.remove(one)
        assert (len(queue), queue.short_tokens, queue.first()) == (0, 0, None)


def test_counters_of_absent_clients_are_dropped() -> None:
    queue = WaitingQueue(SHORT)
    for order in range(100):
        waiting(queue, order, 5, f"client {order}")
    served(queue)
    for order in range(100, 104):
        waiting(queue, order, 5, "last")
        served(queue)
    assert len(queue._used) <= 2


def submit(name: str, deadline: float = 0.0, queue: float = 0.0) -> Submit:
    sampling = Sampling(max_tokens=1, seed=0)
    return Submit(
        request_id=name, prompt=(1,), sampling=sampling, deadline_seconds=deadline, queue_deadline_seconds=queue
    )


def test_deadlines_expire_in_order() -> None:
    deadlines = Deadlines()
    for one in (submit("a", 9, 3), submit("b", 5), submit("c"), submit("d", 2)):
        deadlines.add(one, "abcd")
    assert deadlines.pop_expired(1.9) == []
    assert deadlines.pop_expired(5) == [("d", "deadline"), ("a", "queue_timeout"), ("b", "deadline")]
    assert deadlines.pop_expired(9) == [("a", "deadline")]


def test_deadlines_of_ended_requests_take_no_memory_forever() -> None:
    deadlines = Deadlines()
    for number in range(10_000):
        deadlines.add(submit(str(number), 1e9), {str(number)})
    assert len(deadlines._heap) <= 1024


REMAINING = st.lists(st.integers(1, 200), max_size=8)


@given(REMAINING, st.integers(0, 100), st.integers(1, 64), st.integers(1, 40))
def test_shares(remaining: list[int], waiting: int, budget: int, short: int) -> None:
    shares = share_prompt_budget(remaining, waiting, budget, short)
    assert shares == share_prompt_budget(remaining, waiting, budget, short), "the same for the same prompts"
    assert all(0 <= share <= tokens for share, tokens in zip(shares, remaining, strict=True))
    assert sum(shares) <= budget
    assert sum(shares) >= min(budget - waiting, sum(remaining)), "only waiting short prompts are left room for"
    long = [(tokens, share) for tokens, share in zip(remaining, shares, strict=True) if tokens > short]
    if long:
        assert long[0][1] >= min(long[0][0], -(-budget // 2)), "the oldest long prompt keeps half"
    short_tokens = sum(tokens for tokens in remaining if tokens <= short)
    short_share = sum(share for tokens, share in zip(remaining, shares, strict=True) if tokens <= short)
    assert short_share >= min(short_tokens, budget // 2), "short prompts keep half"
    for lane in (True, False):
        waiting_in_lane = [tokens - share for tokens, share in zip(remaining, shares, strict=True)
                           if (tokens > short) == lane]  # fmt: skip
        served = [share for tokens, share in zip(remaining, shares, strict=True) if (tokens > short) == lane]
        first = next((index for index, left in enumerate(waiting_in_lane) if left), len(served))
        assert not any(served[first + 1 :]), "first come, first served within a lane"


@given(REMAINING, st.integers(1, 64), st.integers(1, 40))
def test_every_prompt_ends(remaining: list[int], budget: int, short: int) -> None:
    """Every prompt ends while new short prompts arrive in every step."""
    left = remaining
    for _ in range(2 * sum(remaining) // budget + len(remaining) + 1):
        shares = share_prompt_budget(left, 10**6, budget, short)
        left = [tokens - share for tokens, share in zip(left, shares, strict=True)]
        left = [tokens for tokens in left if tokens]
    assert not left


def test_a_short_prompt_passes_long_ones() -> None:
    assert share_prompt_budget([6000, 6000, 10], 0, 512, 256) == [502, 0, 10]
    assert share_prompt_budget([6000, 6000], 30, 512, 256) == [482, 0]
    assert share_prompt_budget([6000, 250, 250], 0, 512, 256) == [256, 250, 6]


def test_most_tokens_of_a_short_prompt() -> None:
    assert [short_prompt_tokens(budget) for budget in (1, 16, 512, 8192)] == [1, 8, 256, SHORT_PROMPT_TOKENS]


def test_limit_follows_the_step_time() -> None:
    limit = PrefillLimit(512, 64)
    assert limit.tokens == 512
    limit.record_step(512, 4 * STEP_SECONDS)
    assert limit.tokens == 128
    limit.record_step(128, STEP_SECONDS / 2)
    assert limit.tokens == 256
    for _ in range(2):
        limit.record_step(128, STEP_SECONDS / 100)
    assert limit.tokens == 512, "never above the budget"
    for _ in range(2):
        limit.record_step(512, 100 * STEP_SECONDS)
    assert limit.tokens == 64, "never below the share that decoding leaves to prompts"


def test_first_chunk_is_small_where_steps_are_timed() -> None:
    limit = PrefillLimit(512, 64, timed=True)
    assert limit.tokens == 64
    limit.record_step(64, STEP_SECONDS / 2)
    assert limit.tokens == 128


def test_limit_ignores_one_interrupted_step_and_small_chunks() -> None:
    limit = PrefillLimit(512, 64)
    limit.record_step(512, STEP_SECONDS / 2)
    limit.record_step(512, 20 * STEP_SECONDS)
    assert limit.tokens == 512
    assert limit.token_seconds == STEP_SECONDS / 2 / 512
    for _ in range(3):
        limit.record_step(63, 10 * STEP_SECONDS)
    assert limit.tokens == 512
