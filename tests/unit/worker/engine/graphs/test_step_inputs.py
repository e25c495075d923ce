"""Static inputs of a step: after any steps before, the tables are those of the last step, and little is copied."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from specdecode_worker.contract import TreeShape
from specdecode_worker.core.request import Request
from specdecode_worker.engine.step_tables import (
    NO_DRAFTS,
    CatchUp,
    DraftInputs,
    GraphKey,
    StagedTensor,
    StepInputs,
)
from specdecode_worker.sampling.params import Features
from specdecode_worker.sampling.sampler import HostMasks
from specdecode_worker.sampling.trees import PLAIN, tree_of
from support.small_llama import submit

CPU, PADDING_SLOT = torch.device("cpu"), 9
CHAIN, TREE = tree_of(TreeShape.chain(2)), tree_of(TreeShape.levels(2, 1))
KEY = GraphKey(4, 6, passes=2, width=2, cuts=True, drafts=("",), features=Features(adjusts=8, history=64))


def requests(*slots: int, **sampling: Any) -> list[Request]:
    rows = [Request.of(submit(slot, sampled=True, tokens=9, **sampling), (), arrived_seconds=0.0) for slot in slots]
    for slot, request in zip(slots, rows, strict=True):
        request.slot = slot
    return rows


def unblocked(one: Request) -> Request:
    """Return the request as it is once ``min_tokens`` have been emitted."""
    one.sampling_params = replace(one.sampling_params, min_tokens=0)
    return one


def catch_up(counts: tuple[int, ...], key_starts: tuple[int, ...]) -> DraftInputs:
    return DraftInputs((CatchUp(counts, key_starts),))


BLOCKED = requests(0, 1, min_tokens=4, stop_token_ids=(3,))
STEPS: dict[str, tuple[Any, ...]] = {
    "first": ((CHAIN, CHAIN), requests(0, 1), catch_up((1, 3), (1, 5)), None),
    "other catch-up": ((CHAIN, CHAIN), requests(0, 1), catch_up((2, 0), (1, 1)), None),
    "other trees": ((CHAIN, TREE), requests(0, 1), catch_up((1, 3), (1, 5)), None),
    "other slots": ((CHAIN, CHAIN), requests(1, 0), catch_up((1, 3), (1, 5)), None),
    "other sampling": ((CHAIN, CHAIN), requests(0, 1, presence_penalty=0.5), catch_up((1, 3), (1, 5)), None),
    "allowed": ((CHAIN, CHAIN), requests(0, 1, allowed_token_ids=(3, 5)), catch_up((1, 3), (1, 5)), None),
    "blocked": ((CHAIN, CHAIN), BLOCKED, catch_up((1, 3), (1, 5)), None),
    "fewer rows": ((TREE,), requests(3), catch_up((4,), (2,)), None),
    "limits": ((CHAIN, CHAIN), requests(0, 1), catch_up((1, 3), (1, 5)), (0, 2)),
    "plain": ((PLAIN, CHAIN, PLAIN), requests(2, 3, 4), catch_up((0, 1, 0), (1, 1, 1)), None),
}


def written(*steps: tuple[Any, ...]) -> dict[str, list[Any]]:
    inputs = StepInputs(KEY, PADDING_SLOT, CPU)
    for step in steps:
        inputs.write(*step)
    return {name: table.tolist() for name, table in inputs.at.items()}


@pytest.mark.parametrize("last", STEPS)
@pytest.mark.parametrize("before", STEPS)
def test_tables_are_those_of_the_last_step(before: str, last: str) -> None:
    assert written(STEPS[before], STEPS[last], STEPS[before], STEPS[last]) == written(STEPS[last])


def test_a_request_whose_parameters_change_is_written_again() -> None:
    one = requests(0, min_tokens=4, stop_token_ids=(3,))
    inputs = StepInputs(KEY, PADDING_SLOT, CPU)
    inputs.write((CHAIN,), one, catch_up((1,), (1,)), None)
    assert inputs.at["min_tokens"][0] == 4
    inputs.write((CHAIN,), [unblocked(one[0])], catch_up((1,), (1,)), None)
    assert inputs.at["min_tokens"][0] == 0


def test_what_stays_the_same_is_not_copied_again(monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[StagedTensor] = []
    queue = StagedTensor.queue
    monkeypatch.setattr(StagedTensor, "queue", lambda self, size=None: (copies.append(self), queue(self, size)))
    drafting, plain = StepInputs(KEY, PADDING_SLOT, CPU), StepInputs(GraphKey(2, 1), PADDING_SLOT, CPU)
    trees, rows, *_ = STEPS["first"]
    counts = []
    for inputs, these in ((drafting, trees), (plain, (PLAIN, PLAIN))):
        for _ in range(3):
            copies.clear()
            inputs.write(these, rows, catch_up((1, 3), (1, 5)), None)
            counts.append(len(copies))
    assert counts == [4, 0, 0, 3, 0, 0]


def test_masks_of_an_earlier_step_are_cleared() -> None:
    inputs = StepInputs(GraphKey(1, 2, features=Features(masks=True)), PADDING_SLOT, CPU)
    for masks in (None, HostMasks([3, 4], np.zeros((2, 1), np.uint32)), None):
        inputs.write((PLAIN,), requests(0), NO_DRAFTS, None, masks)
        assert inputs.at["mask_row"].tolist() == ([0, 0] if masks is None else masks.rows)
