"""Admission: the queue before the engine, the limits and deadlines of a request, and the seeds of its choices."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.datastructures import Headers

from specdecode_worker.contract import ServerConfig
from specdecode_worker.server.admission import (
    MAX_LOGPROBS_PER_REQUEST,
    AdmissionQueue,
    ModelLimits,
    RequestTerms,
    check_ids,
    read_timeout,
    seeds_of,
    terms_of,
    token_limits,
)
from specdecode_worker.server.errors import BadRequest, TooManyWaiting
from specdecode_worker.server.requests import ChatRequest, CompletionRequest


def test_requests_beyond_the_capacity_are_rejected() -> None:
    queue = AdmissionQueue(max_num_seqs=2, max_waiting=3)
    queue.check(in_flight=3, more=2, now=0, field="n")
    with pytest.raises(TooManyWaiting) as full:
        queue.check(in_flight=3, more=3, now=0, field="n")
    assert full.value.headers == {"Retry-After": "1"}
    with pytest.raises(BadRequest, match="at most 5"):
        queue.check(in_flight=0, more=6, now=0, field="n")


@pytest.mark.parametrize(
    ("times", "now", "leaving", "seconds"),
    [
        ((), 100, 3, 1),
        ((0,), 100, 3, 1),
        ((0, 2, 4, 6), 8, 1, 2),
        ((0, 2, 4, 6), 8, 3, 6),
        ((0, 0.1, 0.2), 0.3, 1, 1),
        ((0, 2), 40, 1, 20),
        ((0, 2), 400, 9, 60),
    ],
)
def test_retry_after_time(times: tuple[float, ...], now: float, leaving: int, seconds: int) -> None:
    queue = AdmissionQueue(1, 1)
    for end in times:
        queue.record_end(end)
    assert queue.wait_seconds(leaving, now) == seconds


def take(queue: AdmissionQueue, client: str, most: int, now: float = 0.0, in_flight: int = 0) -> int:
    """Start up to ``most`` generations of a client and return how many the queue accepted."""
    for taken in range(most):
        try:
            queue.check(in_flight + taken, 1, now, "n", client)
        except TooManyWaiting:
            return taken
        queue.record_start(client)
    return most


def test_a_lone_client_may_fill_the_queue() -> None:
    assert take(AdmissionQueue(4, 16), "flood", 30) == 20


def test_a_flooding_client_leaves_places_to_another_active_one() -> None:
    queue = AdmissionQueue(4, 16)
    assert take(queue, "quiet", 1) == 1
    flood = take(queue, "flood", 30, in_flight=1)
    assert flood == 20 // 2, "its equal share"
    assert take(queue, "quiet", 9, in_flight=1 + flood) == 9
    with pytest.raises(TooManyWaiting, match="API key") as refused:
        queue.check(11, 1, 0, "n", "flood")
    assert int(refused.value.headers["Retry-After"]) >= 1


def test_the_first_half_of_the_places_is_not_shared() -> None:
    queue = AdmissionQueue(4, 16)
    for name in "abcdefghi":
        queue.check(0, 1, 0, "n", name)
    assert take(queue, "flood", 30) == 10, "its share would be two of twenty"


def test_an_absent_client_keeps_no_share() -> None:
    queue = AdmissionQueue(4, 16)
    queue.check(0, 1, 0, "n", "gone")
    assert take(queue, "flood", 30, now=299) == 10
    assert take(queue, "flood", 30, now=301, in_flight=10) == 10


def test_a_newcomer_to_a_full_queue_gets_the_next_places() -> None:
    queue = AdmissionQueue(1, 9)
    assert take(queue, "flood", 30) == 10
    assert take(queue, "new", 1, in_flight=10) == 0
    queue.record_end(1, "flood")
    assert take(queue, "flood", 1, now=2, in_flight=9) == 0
    assert take(queue, "new", 1, now=2, in_flight=9) == 1


def test_a_client_without_places_may_exceed_its_share() -> None:
    """A request with more choices than the share would otherwise never be accepted."""
    queue = AdmissionQueue(2, 8)
    assert take(queue, "other", 4) == 4
    queue.check(4, 6, 0, "n", "many")


LIMITS = ModelLimits(131_072, 258, {258: "[PAD]"}, end_tokens=(2, 3))


def completion(**fields: Any) -> CompletionRequest:
    return CompletionRequest(model="m", **{"prompt": "p", **fields})


def chat(**fields: Any) -> ChatRequest:
    return ChatRequest(model="m", messages=[{"role": "user", "content": "hi"}], **fields)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"logit_bias": {"258": 1}}, r"logit_bias: the token '\[PAD\]' \(258\)"),
        ({"stop_token_ids": [258]}, r"stop_token_ids: the token '\[PAD\]' \(258\)"),
        ({"allowed_token_ids": [1, 258]}, r"allowed_token_ids: the token '\[PAD\]' \(258\)"),
        ({"stop_token_ids": [999]}, "stop_token_ids: there is no token 999"),
    ],
)
def test_fields_with_foreign_tokens_are_refused_by_name(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(BadRequest, match=named):
        check_ids(completion(**fields), LIMITS)


def test_allowed_tokens_that_all_end_the_answer_are_refused_with_min_tokens() -> None:
    with pytest.raises(BadRequest, match="nothing but tokens that end the answer"):
        check_ids(completion(allowed_token_ids=[3, 9], stop_token_ids=[9], min_tokens=1, max_tokens=5), LIMITS)
    check_ids(completion(allowed_token_ids=[3, 9], min_tokens=1, max_tokens=5), LIMITS)
    check_ids(completion(allowed_token_ids=[3, 2]), LIMITS)
    check_ids(completion(min_tokens=1, max_tokens=5), LIMITS)


def test_logprobs_are_bounded_over_choices_tokens_and_prompts() -> None:
    prompts = [[1] * 100] * 2
    per_token = 4 * 21
    most = MAX_LOGPROBS_PER_REQUEST // (2 * per_token)
    fitting = completion(n=4, max_tokens=most, logprobs=20)
    assert token_limits(fitting, prompts, LIMITS) == [most, most]
    for fields in ({"max_tokens": most + 1}, {"max_tokens": most, "echo": True}, {"max_tokens": most, "n": 5}):
        with pytest.raises(BadRequest, match=r"log-probabilities .* Lower max_tokens"):
            token_limits(completion(**{"n": 4, "logprobs": 20, **fields}), prompts, LIMITS)


def test_requests_without_logprobs_are_not_bounded() -> None:
    assert token_limits(completion(n=128, max_tokens=100_000), [[1]], LIMITS) == [100_000]


def test_default_length_is_lowered_to_what_the_bound_admits() -> None:
    request = chat(logprobs=True, top_logprobs=20)
    assert token_limits(request, [[1]], LIMITS) == [MAX_LOGPROBS_PER_REQUEST // 21]
    with pytest.raises(BadRequest, match="log-probabilities"):
        token_limits(chat(logprobs=True, top_logprobs=20, n=128), [[1]], LIMITS)


CONFIG = ServerConfig(request_timeout_seconds=100, queue_timeout_seconds=20)


@pytest.mark.parametrize(
    ("client", "headers", "deadline"),
    [("", {}, 1100.0), ("ann", {"X-Request-Timeout": "2.5"}, 1002.5), ("", {"X-Request-Timeout": "1e6"}, 1100.0)],
)
def test_a_header_lowers_the_deadline_and_does_not_raise_it(
    client: str, headers: dict[str, str], deadline: float
) -> None:
    terms = terms_of(client, Headers(headers), CONFIG, now=1000.0)
    assert terms == RequestTerms(client, deadline_seconds=deadline, queue_deadline_seconds=1020.0)


@pytest.mark.parametrize("header", ["", "0", "-1", "nan", "inf", "-inf", "1e999", "soon", "1s"])
def test_invalid_header(header: str) -> None:
    with pytest.raises(BadRequest, match="positive number") as refused:
        read_timeout(header, 100)
    assert refused.value.param == "X-Request-Timeout"


@given(seed=st.integers(-(2**63), 2**63 - 1), count=st.integers(1, 128))
def test_seeds_are_distinct_and_start_with_the_requests_seed(seed: int, count: int) -> None:
    choice_seeds = seeds_of(seed, count)
    assert choice_seeds[0] == seed % 2**63
    assert len(set(choice_seeds)) == count
    assert all(0 <= one < 2**63 for one in choice_seeds)
    assert choice_seeds == seeds_of(seed, 130)[:count], "they do not depend on the number of choices"


@given(seed=st.integers(0, 2**62))
def test_adjacent_seeds_give_independent_streams(seed: int) -> None:
    assert not set(seeds_of(seed, 16)) & set(seeds_of(seed + 1, 16))


def test_missing_seed_is_drawn_at_random() -> None:
    assert seeds_of(None, 2) != seeds_of(None, 2)
