"""Settings of a training run and the schedules of learning rate, depth and loss derived from them.

A schedule is a function of the completed share of the run, 0 to 1.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from specdecode_worker.training.optimization.objective import LossSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSettings:
    """Settings of a training run. Training ends after ``steps``, or after ``minutes`` if ``steps`` is 0.

    The defaults are those that produced the shipped head.
    """

    steps: int = 0
    minutes: float = 65.0
    learning_rate: float = 1e-3
    # Learning rate of lm_head relative to the rest: its rows start as the target's, and rare tokens have few examples.
    output_rate: float = 0.1
    warmup: float = 0.02  # share of the run
    final_rate: float = 0.03  # learning rate at the end of the cosine, relative to learning_rate
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0
    batch_tokens: int = 1024
    accumulate: int = 1  # batches per optimizer step, over all ranks
    depth: int = 7
    deepen_at: tuple[float, ...] = (
        0.05,
        0.15,
        0.3,
        0.45,
        0.55,
        0.65,
    )  # shares of the run at which one more depth is unrolled; shallow steps are cheaper
    decay: float = 0.8
    divergence_until: float = 0.1  # share of the run up to which the loss is the divergence alone
    acceptance_from: float = 0.3  # share of the run from which the divergence weight is divergence_floor
    divergence_floor: float = 0.4  # weight of the divergence at the end; acceptance has the rest
    # Temperatures of the served mix and their shares; 0.3 represents greedy requests (see ``normalizers``).
    mix: tuple[tuple[float, float], ...] = ((0.3, 0.5), (0.6, 0.15), (0.8, 0.25), (1.0, 0.1))
    patience: int = 0  # validations without improvement after which training stops early; 0: never
    seed: int = 0
    validate_every: float = 240.0  # seconds of training between validations, each followed by a checkpoint
    # Steps between validations instead of seconds, if not 0: the choice of the best draft then depends on no clock.
    validate_steps: int = 0


def learning_rate_factor(share: float, settings: TrainSettings) -> float:
    """Return the learning rate factor: a linear warmup, then half a cosine down to ``final_rate``."""
    if share < settings.warmup:
        return (share + 1e-3) / (settings.warmup + 1e-3)
    along = min(1.0, (share - settings.warmup) / (1 - settings.warmup))
    return settings.final_rate + (1 - settings.final_rate) * (1 + math.cos(math.pi * along)) / 2


def depth_at(share: float, settings: TrainSettings) -> int:
    """Return the number of depths to unroll at this share of the run."""
    return min(settings.depth, 1 + sum(share >= start for start in settings.deepen_at))


def loss_settings_at(share: float, step: int, settings: TrainSettings) -> LossSettings:
    """Return the loss parameters of ``step``.

    The temperature is drawn from the mix by a generator seeded with (seed, step), so a repeated step gets the same one.
    """
    temperatures, shares = zip(*settings.mix, strict=True)
    drawn = random.Random(f"{settings.seed}/{step}").choices(temperatures, shares)[0]
    blend = max(1e-9, settings.acceptance_from - settings.divergence_until)
    along = min(1.0, max(0.0, (share - settings.divergence_until) / blend))
    divergence = 1 - along * (1 - settings.divergence_floor)
    return LossSettings(depth=depth_at(share, settings), decay=settings.decay, divergence=divergence, temperature=drawn)
