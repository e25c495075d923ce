"""Hand-over of the replicas: the running number is the starting point in both directions."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from specdecode_operator.api.v1alpha1 import Status
from specdecode_operator.scaling import take_over
from specdecode_operator.state.learned import LearnedState, ScalingState, Session
from support.operators.fleet import Fleet, SimulatedWorker, Truth, deployment_with, restarted

OPERATOR = {"owner": "Operator", "minReplicas": 1, "maxReplicas": 4}
EXTERNAL = {"owner": "External", "minReplicas": 1, "maxReplicas": 4}
LOST = Session(learned=LearnedState(uid="u1"), stored=False)
"""Session of a process that finds no stored state."""


@dataclass
class Running(Fleet):
    """A deployment whose spec changes, with workers that follow each decision at once."""

    memory: Session = field(default_factory=lambda: LOST)
    waiting: float = 0.0
    """Requests that wait at each worker."""

    def replicas(self, polls: int) -> list[int]:
        """Poll so many times. Return the replicas after each."""
        return [self._followed() for _ in range(polls)]

    def _followed(self) -> int:
        for worker in self.workers.values():
            worker.truth.waiting = self.waiting
        decision = self.poll()
        count = decision.scale.replicas
        started = {f"p{index}": SimulatedWorker(Truth(), plan=decision.plan, seed=index) for index in range(count)}
        self.workers = {name: self.workers.get(name, worker) for name, worker in started.items()}
        self.deployment = replace(self.deployment, status=Status(observed_generation=self.deployment.generation))
        return count

    def edit(self, **spec: Any) -> None:
        """Change the spec as a user does; the generation rises."""
        generation = self.deployment.generation + 1
        self.deployment = replace(deployment_with(self.deployment.status, **spec), generation=generation)


def scaled_to_four() -> Running:
    """A deployment with spec.replicas 1 that the operator scaled to 4 workers; requests no longer wait."""
    running = Running(deployment_with(replicas=1, scaling=OPERATOR), waiting=100.0)
    assert running.replicas(8)[-1] == 4
    running.waiting = 0.0
    return running


@pytest.mark.parametrize("scaling", [EXTERNAL, None])
def test_operator_to_external_keeps_the_running_number(scaling: dict[str, Any] | None) -> None:
    running = scaled_to_four()
    running.edit(replicas=1, scaling=scaling)
    assert set(running.replicas(20)) == {4}
    running.memory = restarted(running.memory)
    assert set(running.replicas(3)) == {4}
    running.edit(replicas=3, scaling=scaling)
    assert set(running.replicas(3)) == {3}, "kubectl scale or an HPA is followed at once"
    running.edit(replicas=1, scaling=scaling)
    assert set(running.replicas(3)) == {1}, "also back to the value at the hand-over"


@pytest.mark.parametrize("is_spec_observed", [False, True])
def test_a_deployment_at_rest_gets_the_workers_of_its_spec(is_spec_observed: bool) -> None:
    state = ScalingState(replicas=0, spec_replicas=1, owned=True)
    for spec_replicas in (1, 0, 0, 2):
        state = take_over(
            state, spec_replicas=spec_replicas, running=0, is_owner=False, is_spec_observed=is_spec_observed
        )
        assert state.replicas == spec_replicas


def test_a_number_that_is_written_with_the_hand_over_is_followed() -> None:
    running = scaled_to_four()
    running.replicas(1)
    running.edit(replicas=2, scaling=EXTERNAL)
    assert set(running.replicas(3)) == {2}


@pytest.mark.parametrize("scaling", [EXTERNAL, None])
def test_lost_state_keeps_the_running_number_of_an_unchanged_spec(scaling: dict[str, Any] | None) -> None:
    running = scaled_to_four()
    running.edit(replicas=1, scaling=scaling)
    running.replicas(2)
    running.memory = LOST
    assert set(running.replicas(3)) == {4}
    running.memory = LOST
    running.edit(replicas=2, scaling=scaling)
    assert set(running.replicas(3)) == {2}, "a spec that changed meanwhile may have been scaled"


def test_lost_state_keeps_the_running_number_of_the_operator() -> None:
    running = scaled_to_four()
    running.memory = LOST
    assert running.replicas(2) == [4, 4]


@pytest.mark.parametrize("scaling", [EXTERNAL, None])
@pytest.mark.parametrize("number", [1, 4])
def test_external_to_operator_starts_from_the_running_number(scaling: dict[str, Any] | None, number: int) -> None:
    """Demand for more workers counts from the hand-over on: two polls, as for any rise."""
    running = Running(deployment_with(replicas=number, scaling=scaling), waiting=40.0 * (number == 1))
    assert set(running.replicas(12)) == {number}
    running.edit(replicas=number, scaling=OPERATOR)
    after = running.replicas(4)
    assert after[0] == number
    assert (after[-1] > 1) if number == 1 else (set(after) == {4})


def test_back_and_forth_changes_nothing() -> None:
    running = scaled_to_four()
    for scaling in (EXTERNAL, OPERATOR, None, OPERATOR, EXTERNAL):
        running.edit(replicas=1, scaling=scaling)
        assert set(running.replicas(3)) == {4}
        running.memory = restarted(running.memory)


def test_a_new_deployment_starts_with_spec_replicas() -> None:
    for scaling in (OPERATOR, EXTERNAL, None):
        assert Running(deployment_with(replicas=2, scaling=scaling)).replicas(2) == [2, 2]


def test_advisory_keeps_the_running_number() -> None:
    running = scaled_to_four()
    running.edit(replicas=1, scaling=OPERATOR, speculation={"mode": "Advisory"})
    running.memory = LOST
    assert set(running.replicas(12)) == {4}


def test_state_of_an_older_version_is_not_taken_for_the_running_number() -> None:
    """It stored what demand asked for under an external owner, not what ran."""
    old = ScalingState(replicas=4, above_polls=7)
    external = take_over(old, spec_replicas=1, running=1, is_owner=False, is_spec_observed=True)
    ours = take_over(old, spec_replicas=1, running=1, is_owner=True, is_spec_observed=False)
    assert (external.replicas, ours.replicas, ours.above_polls) == (1, 1, 0)
    assert take_over(old, spec_replicas=1, running=None, is_owner=True, is_spec_observed=False).replicas == 4
