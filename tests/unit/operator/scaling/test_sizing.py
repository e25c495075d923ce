"""From reports to replicas, by way of the whole decision: owners, limits, and the start-up time of a worker."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import pytest

from specdecode_operator.state.learned import Session
from specdecode_operator.types import Decision, Worker
from specdecode_worker.contract import Plan, TrafficCell, TreeShape
from support.operators.fleet import SimulatedWorker, Truth, decided, deployment_with

OPERATOR = {"scaling": {"owner": "Operator", "maxReplicas": 6}}
POLL_SECONDS = 5.0


def after_polls(rate: float, **spec: Any) -> Decision:
    """Return the decision after six polls at ``rate`` requests per second."""
    return decisions([int(rate * POLL_SECONDS * index) for index in range(1, 7)], **spec)[-1]


def decisions(counts: Sequence[int], *, output: int = 50, **spec: Any) -> list[Decision]:
    """Return one decision for each poll; ``counts`` are the requests so far, of 100 prompt and ``output`` tokens."""
    deployment, result = deployment_with(**spec), []
    worker = SimulatedWorker(Truth(sequences=1), plan=Plan(initial=TreeShape.chain(3)))
    memory, now = Session(), 1e6
    for count in counts:
        worker.run(POLL_SECONDS)
        now += POLL_SECONDS
        tokens = {"prompt_tokens": 100 * count, "cached_tokens": 0, "output_tokens": output * count}
        traffic = (TrafficCell(task="other", arrivals=count, finished=count, **tokens),)
        report = worker.report().model_copy(update={"traffic": traffic})
        pod = Worker(name="p", uid="p", address="10.0.0.1", ready=True, report=report)
        decision, memory = decided(deployment, memory, now=now, workers=(pod,))
        result.append(decision)
    return result


def test_arrivals_over_capacity_make_replicas() -> None:
    """A sequence alone brings some 60 tokens a second, 13 of them several times that: 5 requests of 50 fit one."""
    few, many = after_polls(1, **OPERATOR), after_polls(40, **OPERATOR)
    assert few.scale.capacity.limited_by == "slots"
    assert (few.scale.replicas, few.scale.wanted) == (1, 1)
    assert many.scale.wanted == pytest.approx(40 / many.scale.capacity.rate, abs=1)
    assert many.scale.replicas == min(6, many.scale.wanted)
    assert many.scale.arrivals == pytest.approx(40, rel=0.05)


def test_a_burst_is_no_lasting_rate() -> None:
    """A worker serves one answer of 800 tokens every three seconds. Six arrivals in 15 seconds exceed that, but may be
    chance; 22 arrivals are significant."""
    few, many = (list(accumulate((1, 1, 1, new, 1, 1, 1))) for new in (4, 20))
    asked = decisions(few, output=800, **OPERATOR)
    carried = asked[3].scale.capacity
    assert carried.rate < (1 + 1 + 4) / 15, "of the look in which they came"
    assert [decision.scale.replicas for decision in asked] == [1] * 7
    assert decisions(many, output=800, **OPERATOR)[-1].scale.replicas > 1


def test_an_external_owner_reads_the_desired_replicas() -> None:
    external = after_polls(40, scaling={"owner": "External", "maxReplicas": 6}, replicas=2)
    ours = after_polls(40, **OPERATOR)
    assert external.scale.replicas == 2
    assert external.scale.desired == ours.scale.replicas > 2
    assert external.scale.wanted == ours.scale.wanted
    assert external.scale.limited is None
    unscaled = after_polls(40, replicas=2)
    assert (unscaled.scale.wanted, unscaled.scale.arrivals) == (None, None), (
        "without spec.scaling demand is not reported"
    )


def test_the_capacity_is_that_of_the_pinned_shape() -> None:
    """A plain step takes some 20 ms, and speculation half of that a token."""
    free, plain = (
        after_polls(4, speculation={"objective": {"itl": "15ms"}, "pin": pin}, **OPERATOR).scale.capacity
        for pin in (None, "none")
    )
    assert (free.attainable, plain.attainable) == (True, False)
