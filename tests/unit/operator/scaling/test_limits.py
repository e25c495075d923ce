"""Reasons why replicas do not follow demand."""

from __future__ import annotations

from specdecode_operator.api.v1alpha1 import ScalingSpec
from specdecode_operator.scaling import placement_problem, scaling_limit
from specdecode_operator.types import Capacity, Worker

SPEC = ScalingSpec(min_replicas=1, max_replicas=8)
ONE = Capacity(rate=2.0, sequences=10, step_seconds=0.03, limited_by="slots")


def test_unschedulable_pods_are_reported_before_the_maximum() -> None:
    troubles = ("Unschedulable: 0/3 nodes are available", "worker: CrashLoopBackOff: x")
    workers = [Worker(name=name, uid=name, address=None, ready=False, trouble=name) for name in troubles]
    assert scaling_limit(SPEC, 3, ONE) is None
    at_most = scaling_limit(SPEC, 9, ONE)
    unplaced = scaling_limit(SPEC, 9, ONE, placement_problem=placement_problem(None, workers))
    assert (at_most.reason, unplaced.reason) == ("AtMaximum", "Unschedulable")
    assert "1 pods" in unplaced.message
