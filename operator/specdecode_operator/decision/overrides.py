"""Pins: shapes that the user prescribes, laid over what was measured. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from specdecode_operator.api.pins import Pin, pin_text, read_pin
from specdecode_operator.errors import SpecError
from specdecode_operator.state.learned import RowState
from specdecode_operator.types import Deployment


@dataclass(frozen=True, slots=True, kw_only=True)
class PinState:
    """The pin in force."""

    pin: Pin | None
    text: str
    """Text of the pin; empty without one."""
    problem: str | None = None
    """Reason why the present pin cannot be used. The last valid pin stays in force."""


def read_pin_state(deployment: Deployment, last: str) -> PinState:
    """Read the pins of the spec.

    Args:
        deployment: The deployment with its spec.
        last: Text of the pin that was in force so far.
    """
    speculation = deployment.spec.speculation
    if deployment.spec.paused:
        return PinState(pin=None, text=last)
    text = pin_text(speculation)
    try:
        return PinState(pin=read_pin(text, speculation), text=text)
    except SpecError as error:
        problem = str(error)
    try:
        return PinState(pin=read_pin(last, speculation), text=last, problem=problem)
    except SpecError:  # the spec has changed since the pin was valid
        return PinState(pin=None, text="", problem=problem)


def without_pinned(chosen: Iterable[RowState], known: Iterable[RowState], pin: Pin | None) -> tuple[RowState, ...]:
    """Return the rows to persist: those of pinned tasks as they were, because what does not run teaches nothing."""
    if pin is None:
        return tuple(chosen)
    before = {(row.task, row.concurrency, row.context): row for row in known}
    return tuple(
        row if pin.shape_of(row.task) is None else before.get((row.task, row.concurrency, row.context), row)
        for row in chosen
    )
