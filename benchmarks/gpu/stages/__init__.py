"""Stages of `make gpu`, in three parts, each in the order of worth.

A stage is a function that yields rows; every row is stored at once.

Each stage runs in a process of its own (stage.py), so that a failure ends that stage alone. This module imports none of
them, so that the process that starts the stages does not either.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Stage:
    """``function`` is ``module.function`` of this package. ``budget_seconds`` is what it may take of the whole; less
    when those before took longer."""

    name: str
    function: str
    budget_seconds: float
    interpreted: bool = False
    """In a dry run its kernels go through Triton's interpreter."""


@dataclass(frozen=True, slots=True)
class Run:
    """Settings of a run that every stage gets. A ``dry`` run uses tiny shapes on a CPU and measures nothing."""

    device: torch.device
    dry: bool
    rate: float
    """Bytes a second of reading; 0 where that was not measured."""


TESTS = "tests"
"""Name of the stage that runs tests/gpu."""
TESTS_PROCESSES = 6
PARTS = (
    (
        Stage("copy", "kernels.copy", 20),
        Stage("engine-8b", "steps.engine_8b", 200),
        Stage("attention", "kernels.attention", 30, interpreted=True),
        Stage("products", "kernels.products", 70, interpreted=True),
        Stage("sampling", "kernels.sampling", 20),
        Stage(TESTS, "", 100),
    ),
    (
        Stage("copy", "kernels.copy", 20),
        Stage("serving", "serving.serving", 80),
        Stage("engine-8b-batches", "steps.engine_8b_batches", 80),
        Stage("texts", "comparisons.texts", 40),
        Stage("quantised", "kernels.quantised", 60, interpreted=True),
        Stage("prefill-attention", "kernels.prefill", 20, interpreted=True),
        Stage("engine-70b-eighth", "steps.engine_70b", 65),
        Stage("peers", "peers.torch_compile", 150),
    ),
    (
        Stage("copy", "kernels.copy", 20),
        Stage("engine-scout-int4", "steps.engine_scout_int4", 110),
        Stage("engine-maverick-eighth", "steps.engine_maverick_eighth", 100),
        Stage("engine-scout-fp8", "steps.engine_scout_fp8", 100),
        Stage("trees", "comparisons.trees", 50),
        Stage("engine-8b-int4-draft", "steps.engine_8b_int4_draft", 40),
        Stage("multi-round", "comparisons.multi_round", 40),
        Stage("two-drafts", "comparisons.two_drafts", 40),
        Stage("engine-8b-eager", "steps.engine_8b_eager", 30),
    ),
)
"""Stages of the three parts of `make gpu`. Those of a part take at most SECONDS together."""
SECONDS = 560
"""Time of a run: ten minutes less what its start takes."""
STAGES = tuple({stage.name: stage for part in PARTS for stage in part}.values())
