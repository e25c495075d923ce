"""Stages of `make gpu`, in the order of worth. A stage is a function that yields rows; every row is stored at once.

Each stage runs in a process of its own (stage.py), so that a failure ends that stage alone. This module has names and
times only, so that the process that starts the stages imports none of them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stage:
    """``function`` is ``module.function`` of this package. ``budget_seconds`` is what it may take of the whole; less
    when those before took longer."""

    name: str
    function: str
    budget_seconds: float
    interpreted: bool = False
    """In a dry run its kernels go through Triton's interpreter."""


TESTS_SECONDS = 100.0
"""For tests/gpu, which run first."""
TESTS_PROCESSES = 6
STAGES = (
    Stage("copy", "kernels.copy", 20),
    Stage("engine-8b-short", "steps.engine_8b_short", 60),
    Stage("engine-8b", "steps.engine_8b", 140),
    Stage("attention", "kernels.attention", 50, interpreted=True),
    Stage("sampling", "kernels.sampling", 20),
    Stage("profile", "profiles.profile_steps", 50),
    Stage("serving", "serving.serving", 70),
    Stage("prefill-attention", "kernels.prefill", 40, interpreted=True),
    Stage("products", "kernels.products", 40, interpreted=True),
    Stage("trees", "comparisons.trees", 50),
    Stage("multi-round", "comparisons.multi_round", 40),
    Stage("two-drafts", "comparisons.two_drafts", 40),
    Stage("texts", "comparisons.texts", 40),
    Stage("quantised", "kernels.quantised", 60, interpreted=True),
    Stage("engine-8b-eager", "steps.engine_8b_eager", 30),
    Stage("engine-8b-int4-draft", "steps.engine_8b_int4_draft", 30),
    Stage("engine-70b-eighth", "steps.engine_70b", 65),
)
