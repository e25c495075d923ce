"""Number of steps until the next rule of the worker's guard applies, so that the steps before can be simulated at once.

After the last step count of the stop rules, the guard may stop a shape at any step; the caller bounds such segments.
"""

from __future__ import annotations

from collections.abc import Iterable

from specdecode_worker.control.plan import (
    CHECK_STEPS,
    EARLY_STOP_RULES,
    MIN_REPORTED_STEPS,
    PROBE_STEPS,
    STOP_RULES,
    ShapeState,
)

_STOP_STEPS = tuple(steps for steps, _ in reversed(STOP_RULES))
_PROBE_STEPS = (*(steps for steps, _ in reversed(EARLY_STOP_RULES)), PROBE_STEPS)


def steps_until_decision(states: Iterable[ShapeState], most: int) -> int:
    """Return the steps until a rule applies that may stop, confirm, probe or resume a shape, from 1 to ``most``."""
    return max(1, min((_steps_of(state, most) for state in states), default=most))


def _steps_of(state: ShapeState, most: int) -> int:
    """Return the steps until the next step count at which a rule of the guard applies to this shape."""
    if state.check is not None:
        return CHECK_STEPS - state.check.steps
    if state.probe is not None:
        return _next_edge(state.probe.steps, _PROBE_STEPS, most)
    if state.suppressed:
        return MIN_REPORTED_STEPS if state.probe_due else state.probe_wait - state.steps_since_decision
    return _next_edge(state.speculative.steps, _STOP_STEPS, most)


def _next_edge(steps: int, edges: tuple[int, ...], most: int) -> int:
    """Return the distance from ``steps`` to the next edge, ``most`` beyond the last one."""
    return next((edge - steps for edge in edges if edge > steps), most)
