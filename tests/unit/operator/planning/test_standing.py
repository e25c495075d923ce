"""What stands is not chosen again, and nobody can tell but by the time that it takes."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from fleet import DEFAULTS, Loop, Truth, loop_over, workload_with
from mixed import TaskTruth, mixed_loop

from specdecode_operator.decision.decide import decide
from specdecode_operator.types import Observation, Worker

GOOD, BAD = [0.8, 0.7, 0.6, 0.5], [0.05] * 4
HYSTERESIS = {"minDwellSeconds": 40, "minGainPercent": 1, "maxChangesPerHour": 3}


def looks(loop: Loop, seconds: float, *, working: bool) -> tuple[bool, bool]:
    """One look, and one of an operator that takes nothing for standing. Whether it stood, whether rows moved."""
    if working:
        loop.worker.run(seconds)
    else:
        loop.worker.clock += seconds
    loop.now += seconds
    pod = Worker(name="p", uid="p", address="10.0.0.1", ready=True, report=loop.worker.report())
    observed = Observation(workload=workload_with(), workers=(pod,), session=loop.memory)
    decision, memory = decide(loop.deployment, observed, DEFAULTS, now=loop.now)
    forgetful = replace(observed, session=replace(loop.memory, standing=None))
    assert decide(loop.deployment, forgetful, DEFAULTS, now=loop.now)[0] == decision
    known = loop.memory.standing
    stood, moved = known is not None and memory.standing is known, memory.learned.rows != loop.memory.learned.rows
    loop.memory = memory
    if decision.pushes:
        loop.worker.plan = decision.plan
    return stood, moved


def drawn(kind: str, seed: int) -> Loop:
    speculation: dict[str, Any] = {"hysteresis": HYSTERESIS, "depth": {"max": 4}}
    if kind == "mixed":
        tasks = {"other": TaskTruth(2, [0.5, 0.2]), "code": TaskTruth(2, [0.85, 0.05])}
        tree = {"topK": 2, "maxNodes": 8}
        return mixed_loop(tasks, seed=seed, speculation={**speculation, "tasks": [{"name": "code"}], "tree": tree})
    return loop_over(Truth(chances=list(GOOD)), seed=seed, speculation=speculation)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", ["alone", "mixed"])
def test_what_stands_would_have_been_chosen(kind: str, seed: int) -> None:
    loop, dice = drawn(kind, seed), random.Random(seed)
    stood = 0
    for phase in range(8):
        loop.worker.truth.chances = list(BAD if phase % 3 == 1 else GOOD)
        for _ in range(dice.randint(2, 6)):
            looks(loop, 5, working=True)
        for _ in range(dice.randint(6, 14)):
            stood += looks(loop, dice.choice((3.0, 5.0, 17.0, 61.0, 400.0)), working=False)[0]
    assert stood > 20, "else nothing was tried"


def test_what_is_measured_or_asked_for_is_chosen_anew() -> None:
    loop = drawn("alone", 0)
    for _ in range(6):
        looks(loop, 5, working=True)
    rested = [looks(loop, 61, working=False)[0] for _ in range(6)]
    assert rested[-1]
    spec = loop.deployment.spec
    shallow = spec.speculation.model_copy(update={"depth": spec.speculation.depth.model_copy(update={"max": 1})})
    loop.deployment = replace(loop.deployment, spec=spec.model_copy(update={"speculation": shallow}))
    assert looks(loop, 61, working=False) == (False, True), "bounds hold at once"
    for _ in range(6):
        looks(loop, 61, working=False)
    assert not looks(loop, 5, working=True)[0]
