"""Accounting of a request: the emitted tokens that count."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from specdecode_worker.core.request import Request
from specdecode_worker.sampling.params import FinishRule
from support.worker.small_engine import request, submit


def test_a_stop_token_ends_the_request_and_is_part_of_the_output() -> None:
    one = request(stop_token_ids=(9,))
    assert one.append_output([4, 9, 5]) == [4, 9]
    assert (one.finish, one.tokens, one.emitted) == ("stop", [1, 2, 3, 4, 9], 2)
    assert one.append_output([6]) == []


def test_max_tokens_ends_the_request_in_the_middle_of_a_step() -> None:
    one = request(max_tokens=3)
    assert one.append_output([4, 5]) == [4, 5]
    assert one.finish is None
    assert one.append_output([6, 7]) == [6]
    assert one.finish == "length"


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
