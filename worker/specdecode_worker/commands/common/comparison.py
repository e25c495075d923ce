"""Comparison of speculation variants with plain decoding.

The runs are interleaved, so that a change in the speed of the machine affects all variants equally.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from specdecode_worker.commands.common.local_engine import (
    Answer,
    LocalEngine,
    Prompt,
    RunTiming,
    distinct_4grams,
    sampling_of,
)
from specdecode_worker.contract import MergedDraft, TreeShape


@dataclass(frozen=True, slots=True)
class Variant:
    """Shape and draft to measure.

    ``draft`` is the name of a draft, empty for the first one. ``merge`` names drafts that are merged with it. ``text``
    is the spelling of the user.
    """

    shape: TreeShape
    draft: str = ""
    merge: tuple[MergedDraft, ...] = ()
    text: str = field(default="", compare=False)

    def __str__(self) -> str:
        """Return the spelling of the user, or a canonical one."""
        return self.text or (f"{self.draft}/{self.shape}" if self.draft else str(self.shape))


PLAIN = Variant(TreeShape(()))
"""Plain decoding, without a draft."""


@dataclass(slots=True)
class VariantSums:
    """Sums over the runs of one variant, and the answers of the last run."""

    seconds: float = 0.0
    tokens: int = 0
    steps: int = 0
    answers: list[Answer] = field(default_factory=list)

    def add(self, timing: RunTiming) -> None:
        """Add the sums of one run."""
        self.seconds += timing.seconds
        self.tokens += timing.tokens
        self.steps += timing.steps

    @property
    def timing(self) -> RunTiming:
        """Time, tokens and steps of all runs."""
        return RunTiming(self.seconds, self.tokens, self.steps)


def compare(
    engine: LocalEngine, prompts: Sequence[Prompt], together: int, variants: Sequence[Variant], args: argparse.Namespace
) -> dict[str, dict[str, Any]]:
    """Measure every variant and plain decoding, and return the results by variant.

    Each round runs the variants in order and then in reverse order. A result holds the speed of plain decoding and of
    the variant, their ratio, and the tokens per step.
    """
    sums_of = {variant: VariantSums() for variant in (PLAIN, *variants)}
    for variant in sums_of:
        _warm(engine, prompts[:together], variant, args)
    order = list(sums_of)
    for variant in (order + order[::-1]) * args.rounds:
        engine.run_shape(variant.shape, variant.draft, variant.merge)
        sums = VariantSums()
        sums_of[variant].answers = _waves(engine, prompts, together, args, sums)
        sums_of[variant].add(sums.timing)
        name = "plain" if variant == PLAIN else variant
        print(f"  {together} at once, {name}: {sums.timing.tokens_per_second:.1f} tokens/s", file=sys.stderr)
    return {str(variant): _comparison(sums_of[PLAIN], sums_of[variant]) for variant in variants}


def _waves(
    engine: LocalEngine, prompts: Sequence[Prompt], together: int, args: argparse.Namespace, sums: VariantSums
) -> list[Answer]:
    """Answer all prompts, ``together`` at a time. An incomplete last group is left out."""
    answers: list[Answer] = []
    for start in range(0, len(prompts) - together + 1, together):
        wave = range(start, start + together)
        new, timing = engine.answer([prompts[i] for i in wave], [sampling_of(args, i) for i in wave])
        answers += new
        sums.add(timing)
    return answers


def _warm(engine: LocalEngine, prompts: Sequence[Prompt], variant: Variant, args: argparse.Namespace) -> None:
    """Run a few tokens of a variant before anything is timed."""
    engine.run_shape(variant.shape, variant.draft, variant.merge)
    short = argparse.Namespace(**{**vars(args), "max_tokens": min(args.max_tokens, 8)})
    engine.answer(prompts, [sampling_of(short, index) for index in range(len(prompts))])


def _comparison(plain: VariantSums, speculative: VariantSums) -> dict[str, Any]:
    """Return the results of one variant as a dictionary."""
    drafted = speculative.answers
    drafts = sum(answer.drafts for answer in drafted)
    same = sum(a.tokens == b.tokens for a, b in zip(plain.answers, drafted, strict=True))
    return {
        "plain": _timing_fields(plain.timing),
        "speculative": _timing_fields(speculative.timing),
        "ratio": speculative.timing.tokens_per_second / plain.timing.tokens_per_second,
        "tokens_per_step": 1 + sum(answer.accepted for answer in drafted) / drafts if drafts else 1.0,
        "distinct_4grams": distinct_4grams([answer.tokens for answer in drafted]),
        "identical": same == len(drafted),
        "identical_answers": f"{same}/{len(drafted)}",
    }


def _timing_fields(timing: RunTiming) -> dict[str, float]:
    """Return the speed of a run as a dictionary."""
    return {"tokens_per_second": timing.tokens_per_second, "step_milliseconds": timing.step_milliseconds}
