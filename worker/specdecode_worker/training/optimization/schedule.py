"""Settings of a training run, and what they make of each point in it: rate, depth, and what is aimed at."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from specdecode_worker.training.optimization.objective import Aim


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSettings:
    """Defaults are those that made the shipped head. Training ends after ``steps``, or after ``minutes`` if 0."""

    steps: int = 0
    minutes: float = 65.0
    learning_rate: float = 1e-3
    output_rate: float = 0.1  # lm_head's share of it: its rows start as the target's, and rare tokens have few examples
    warmup: float = 0.02  # share of the run
    final_rate: float = 0.03  # of the learning rate, at the end of the cosine
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0
    batch_tokens: int = 1024
    accumulate: int = 1  # batches of one optimizer step, of all ranks together
    depth: int = 7
    deepen_at: tuple[float, ...] = (
        0.05,
        0.15,
        0.3,
        0.45,
        0.55,
        0.65,
    )  # shares at which deeper ones join: early is cheap
    decay: float = 0.8
    divergence_until: float = 0.1  # share of the run up to which the divergence alone is the loss
    acceptance_from: float = 0.3  # share from which acceptance is, beside ``divergence_floor``
    divergence_floor: float = 0.4
    # Temperatures of the served mix and their shares; 0.3 stands for greedy (see ``normalisers``).
    mix: tuple[tuple[float, float], ...] = ((0.3, 0.5), (0.6, 0.15), (0.8, 0.25), (1.0, 0.1))
    patience: int = 0  # validations without a better one after which training stops; 0: never
    seed: int = 0
    validate_every: float = 240.0  # seconds of training; a checkpoint is written as often
    validate_steps: int = 0  # steps instead, if not 0: which validation is the best then depends on no clock


def rate_at(share: float, settings: TrainSettings) -> float:
    """The learning rate's factor: a linear start, then half a cosine down to ``final_rate``."""
    if share < settings.warmup:
        return (share + 1e-3) / (settings.warmup + 1e-3)
    along = min(1.0, (share - settings.warmup) / (1 - settings.warmup))
    return settings.final_rate + (1 - settings.final_rate) * (1 + math.cos(math.pi * along)) / 2


def depth_at(share: float, settings: TrainSettings) -> int:
    """How deep a step unrolls."""
    return min(settings.depth, 1 + sum(share >= start for start in settings.deepen_at))


def aim_at(share: float, step: int, settings: TrainSettings) -> Aim:
    """The loss of ``step``; its temperature is drawn from the mix, the same whenever this step is taken."""
    temperatures, shares = zip(*settings.mix, strict=True)
    drawn = random.Random(f"{settings.seed}/{step}").choices(temperatures, shares)[0]
    blend = max(1e-9, settings.acceptance_from - settings.divergence_until)
    along = min(1.0, max(0.0, (share - settings.divergence_until) / blend))
    divergence = 1 - along * (1 - settings.divergence_floor)
    return Aim(depth=depth_at(share, settings), decay=settings.decay, divergence=divergence, temperature=drawn)
