"""Tests of the limits of a request: token ids of the model, and the number of log-probabilities."""

from __future__ import annotations

from typing import Any

import pytest

from specdecode_worker.server.admission import (
    MAX_LOGPROBS_PER_REQUEST,
    ModelLimits,
    check_ids,
    token_limit,
    token_limits,
)
from specdecode_worker.server.errors import BadRequest
from specdecode_worker.server.requests import ChatRequest, CompletionRequest

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


@pytest.mark.parametrize(("token", "named"), [(258, r"'\[PAD\]' \(258\)"), (999, "no token 999"), (-1, "no token -1")])
def test_prompts_with_foreign_tokens_are_refused_by_name(token: int, named: str) -> None:
    with pytest.raises(BadRequest, match=named):
        token_limit(completion(), [1, token], LIMITS)


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
