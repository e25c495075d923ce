"""Division of the prompt budget: nothing is wasted, long prompts progress and short ones do not wait for them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from specdecode_worker.engine.scheduler import (
    SHORT_PROMPT_TOKENS,
    STEP_SECONDS,
    PrefillLimit,
    share_prompt_budget,
    short_prompt_tokens,
)

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


def test_prompts_of_one_kind_are_served_in_order_of_arrival() -> None:
    assert share_prompt_budget([30, 40, 10], 0, 60, 50) == [30, 30, 0]
    assert share_prompt_budget([300, 400, 100], 0, 60, 50) == [60, 0, 0]


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
