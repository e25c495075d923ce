"""Speculation with limits of a test, instead of those of speculation.stability."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from specdecode_operator.api.v1alpha1 import STABILITY, SpeculationSpec, StabilityLimits


class LimitedSpeculation(SpeculationSpec):
    """Speculation whose limits a test chose."""

    chosen: StabilityLimits

    @property
    def limits(self) -> StabilityLimits:
        return self.chosen


def speculation_of(fields: Mapping[str, Any]) -> SpeculationSpec:
    """Return spec.speculation. The key ``limits`` has fields of StabilityLimits that differ from Medium."""
    plain = SpeculationSpec.model_validate(
        {name: value for name, value in fields.items() if name != "limits"}, extra="forbid"
    )
    if "limits" not in fields:
        return plain
    return LimitedSpeculation(**plain.model_dump(), chosen=replace(STABILITY["Medium"], **fields["limits"]))
