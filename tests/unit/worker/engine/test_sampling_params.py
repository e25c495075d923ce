"""Sampling parameters of a request, and early stops."""

from __future__ import annotations

import msgspec
import pytest

from specdecode_worker.core.request import Request, sampling_params_of
from specdecode_worker.sampling.params import GREEDY_BELOW, Sampling
from support.worker.small_engine import submit


def test_sampling_params_match_the_request() -> None:
    asked = submit(
        prompt=(4, 5),
        temperature=0.7,
        top_k=3,
        top_p=0.9,
        min_p=0.1,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        repetition_penalty=1.1,
        logit_bias=((3, 1.0), (4, 2.0), (3, 0.5)),
    )
    params = sampling_params_of(asked, ())
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.7, 3, 0.9, 0.1)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.2, 0.3, 1.1)
    assert dict(params.logit_bias) == {3: 1.5, 4: 2.0}
    assert (params.prompt_tokens, params.greedy, params.truncated, params.adjusts) == (2, False, True, True)
    plain = sampling_params_of(submit(), (7,))
    assert (plain.greedy, plain.truncated, plain.adjusts, plain.blocks) == (True, False, False, False)


def test_temperatures_below_a_bound_are_greedy_also_in_records() -> None:
    sent = msgspec.msgpack.encode({"max_tokens": 1, "seed": 2, "temperature": 9e-6})
    assert msgspec.msgpack.decode(sent, type=Sampling).temperature == 0
    assert not sampling_params_of(submit(temperature=GREEDY_BELOW), ()).greedy


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_stop_tokens_and_eos_are_blocked_before_min_tokens(ignore_eos: bool) -> None:
    asked = submit(min_tokens=3, stop_token_ids=(9, 8), ignore_eos=ignore_eos)
    sampling_params = sampling_params_of(asked, (2, 9))
    assert sampling_params.blocked == (2, 8, 9)
    assert sampling_params.blocks
    request = Request.of(asked, (2, 9), arrived_seconds=0.0)
    assert request.append_output([1, 1]) == [1, 1]
    assert request.sampling_params.blocks
    request.append_output([1])
    assert not request.sampling_params.adjusts, "nothing is held back any more, and nothing is paid for it"
    assert request.append_output([5, 8, 1]) == [5, 8]
    assert request.finish == "stop"


def test_a_stop_token_before_min_tokens_does_not_stop() -> None:
    request = Request.of(submit(min_tokens=3, stop_token_ids=(9,)), (), arrived_seconds=0.0)
    assert request.append_output([9, 1, 9, 4]) == [9, 1, 9]
