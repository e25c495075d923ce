"""When figures are published to status: seldom under traffic, and at once when traffic has ended."""

from __future__ import annotations

from dataclasses import replace

from specdecode_operator.api.v1alpha1 import Status
from specdecode_operator.controller.status import traffic_section
from specdecode_operator.decision.decide import PUBLISH_SECONDS
from support.operators.fleet import Loop, loop_over


def poll(loop: Loop, seconds: float, *, works: bool) -> bool:
    """Poll, and write the figures to the status as the reconciler does. Return whether there were any."""
    if works:
        decision = loop.poll(seconds)
    else:
        loop.worker.clock += seconds
        loop.now += seconds
        decision = loop.poll(0.0)
    before = loop.deployment.status.traffic
    status = Status(traffic=traffic_section(before, decision.shown.figures))
    loop.deployment = replace(loop.deployment, status=status)
    return decision.shown.figures is not None


def test_figures_are_published_every_half_minute_under_traffic() -> None:
    loop = loop_over()
    published = [poll(loop, 10.0, works=True) for _ in range(13)]
    assert published[1:] == [True, False, False] * 4


def test_the_end_of_traffic_is_published_once_by_a_late_tick() -> None:
    """A planner that lags decides soon after the decision before, and the next poll is a minute away."""
    loop = loop_over()
    for _ in range(3):
        poll(loop, 60.0, works=True)
    assert poll(loop, 59.0, works=False), "the window has the last traffic"
    assert loop.deployment.status.traffic.running
    assert poll(loop, PUBLISH_SECONDS - 10, works=False)
    assert loop.deployment.status.traffic.running == 0
    assert loop.deployment.status.traffic.tokens_per_second == 0
    assert not poll(loop, PUBLISH_SECONDS - 10, works=False), "the figures of a deployment at rest are known"
