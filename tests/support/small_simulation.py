"""Hand-made loads and outcomes for rules, and short traces."""

from __future__ import annotations

import numpy as np

from specdecode_simulator.records.step_times import DEPTHS, NODES, StepTable
from specdecode_simulator.world.segment import Group, Load, Outcome, Pilot, Segment

ONE = Group(0, 0, 0)


def load_of(sequences: int, group: Group = ONE) -> Load:
    return Load(0.0, 0, sequences, {group: sequences}, 200.0 * sequences)


def outcome_of(load: Load, segment: Segment, survival: list[float], seconds: float = 0.1) -> Outcome:
    """Return what the segment brings where a chain's tokens survive like this, exactly."""
    steps = min(segment.most_steps, 16)
    runs, emitted = {}, 0.0
    for group, count in load.groups.items():
        accepted = sum(survival[: segment.forms[group].depth])
        full = [*survival, *[0.0] * (8 - len(survival))]
        runs[group] = np.array([*full, accepted]) * steps * count
        emitted += steps * count * (1 + accepted)
    return Outcome(steps, seconds * steps, float(load.sequences), emitted, runs)


def depths_over(pilot: Pilot, load: Load, survival: list[float], segments: int) -> list[int]:
    """Depth of each segment, when the pilot is told what it brought."""
    found = []
    for _ in range(segments):
        segment = pilot.next(load)
        found.append(next(iter(segment.forms.values())).depth)
        pilot.measured(load, segment, outcome_of(load, segment, survival))
    return found


def table_of(token_seconds: float, pass_seconds: float = 0.001, base: float = 0.02) -> StepTable:
    sequences, contexts = (1.0, 4.0, 16.0), (128.0, 1024.0)
    grid = [
        [[base + token_seconds * b * (n + 1) + pass_seconds * min(n, DEPTHS - 1) for _ in contexts] for n in NODES]
        for b in sequences
    ]
    return StepTable(
        f"made-{token_seconds}-{pass_seconds}",
        sequences,
        contexts,
        grid,
        (pass_seconds,) * 3,
        (0.0, 1000.0),
        (0.0, 1.0),
        (1.0, 1.0),
    )
