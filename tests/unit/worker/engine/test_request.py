"""Accounting of a request: the emitted tokens that count, its sampling parameters, and early stops."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from specdecode_worker.core.request import Request, sampling_params_of
from specdecode_worker.sampling.params import GREEDY_BELOW, FinishRule, Sampling
from support.worker.small_engine import request, submit


def test_a_stop_at_the_limit_is_a_stop() -> None:
    one = request(max_tokens=1, stop_token_ids=(9,))
    one.append_output([9])
    assert one.finish == "stop"


@pytest.mark.parametrize(("ignore_eos", "finish"), [(False, "stop"), (True, None)])
def test_eos_can_be_ignored_and_stop_ids_cannot(ignore_eos: bool, finish: str | None) -> None:
    one = Request.of(submit(ignore_eos=ignore_eos, stop_token_ids=(8,)), (2,), arrived_seconds=0)
    one.append_output([2])
    assert one.finish == finish
    other = Request.of(submit(ignore_eos=ignore_eos, stop_token_ids=(8,)), (2,), arrived_seconds=0)
    other.append_output([8])
    assert other.finish == "stop"


@pytest.mark.parametrize("sampling", [{"ignore_eos": True}, {"min_tokens": 3}])
def test_an_end_token_ends_a_guided_answer_in_any_case_and_when_it_is_replayed(sampling: dict[str, Any]) -> None:
    guided, free = submit(grammar="g", **sampling), submit(**sampling)
    assert FinishRule.of(guided.sampling, (2,)).finish(2, 1) == "stop"
    assert FinishRule.of(free.sampling, (2,)).finish(2, 1) is None
    with pytest.raises(ValueError, match="complete answer"):
        Request.of(replace(guided, emitted=(4, 2)), (2,), arrived_seconds=0)


@given(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=6), max_size=8), st.integers(1, 20))
def test_output_tokens_do_not_depend_on_the_division_into_steps(steps: list[list[int]], most: int) -> None:
    one, whole = request(max_tokens=most, stop_token_ids=(9,)), request(max_tokens=most, stop_token_ids=(9,))
    output = [token for step in steps for token in one.append_output(step)]
    assert output == whole.append_output([token for step in steps for token in step])
    assert one.tokens == [1, 2, 3, *output]
    assert one.finish == whole.finish
    assert one.emitted == len(output)


def test_biases_of_one_token_are_added() -> None:
    params = sampling_params_of(submit(logit_bias=((3, 1.0), (4, 2.0), (3, 0.5))), ())
    assert dict(params.logit_bias) == {3: 1.5, 4: 2.0}


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
