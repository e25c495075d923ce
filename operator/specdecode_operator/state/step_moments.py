"""Moments of step times without the numbers that follow from the others. Pure.

A kind of step without prefill has 37 sums (see counters.Moments), of which 16 are independent: the feature ``one`` is
always 1, ``draft_passes`` is the same for all steps of the kind, and ``prefill_tokens`` is 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from specdecode_operator.state.compact import rounded
from specdecode_operator.telemetry.counters import PAIRS, K
from specdecode_worker.contract import FEATURES

DERIVED = "="
"""Mark of a number that follows from the others."""
TOLERANCE = 2e-5
"""Relative difference up to which a sum counts as derived. Sums are rounded to six digits before."""

_COUNT, _TIME, _X = 0, 1, 4
_XT, _XX = _X + K, _X + 2 * K
_LENGTH = _XX + len(PAIRS)


def shorten_cell(cell: Mapping[str, Any]) -> dict[str, Any]:
    """Return a StepTimeCell's fields with its sums rounded and derived sums marked."""
    return {**cell, **{name: _shorten(cell[name], cell) for name in ("values", "new_values")}}


def restore_cell(cell: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that ``shorten_cell`` was given, at six digits."""
    return {**cell, **{name: _restore(cell.get(name, []), cell) for name in ("values", "new_values")}}


def _shorten(values: list[float], cell: Mapping[str, Any]) -> list[Any]:
    short = list(map(rounded, values))
    if cell["prefill"] or len(values) != _LENGTH:
        return short
    shortened: list[Any] = list(short)
    for index, sum_ in _derived(short, cell["draft_passes"]):
        if abs(short[index] - sum_) <= TOLERANCE * abs(sum_):
            shortened[index] = DERIVED
            short[index] = sum_
    return shortened


def _restore(values: list[Any], cell: Mapping[str, Any]) -> list[float]:
    restored = list(values)
    if DERIVED in values:
        for index, sum_ in _derived(restored, cell["draft_passes"]):
            if restored[index] == DERIVED:
                restored[index] = sum_
    return restored


def _derived(values: list[Any], passes: int) -> Iterator[tuple[int, float]]:
    """Yield the position and the expected value of each derived sum. ``values`` may be completed meanwhile: a sum is
    computed from sums that come before it."""
    one, drafting, prefilling = (FEATURES.index(name) for name in ("one", "draft_passes", "prefill_tokens"))
    constants = {one: 1.0, drafting: float(passes), prefilling: 0.0}
    for feature, constant in constants.items():
        yield _X + feature, rounded(constant * values[_COUNT])
        yield _XT + feature, rounded(constant * values[_TIME])
    for position, (row, column) in enumerate(PAIRS):
        for fixed, other in ((row, column), (column, row)):
            if fixed in constants:
                yield _XX + position, rounded(constants[fixed] * values[_X + other])
                break
