"""Variants of speculation against plain decoding, interleaved: what drifts meanwhile falls on all of them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from specdecode_worker.commands.common.local_engine import (
    Answer,
    LocalEngine,
    Pace,
    Prompt,
    distinct_4grams,
    sampling_of,
)
from specdecode_worker.contract import TreeShape


@dataclass(frozen=True, slots=True)
class Variant:
    """A shape, drafted by the draft of this name (the first is nameless). ``text`` is how the user wrote it."""

    shape: TreeShape
    draft: str = ""
    text: str = field(default="", compare=False)

    def __str__(self) -> str:
        return self.text or (f"{self.draft}/{self.shape}" if self.draft else str(self.shape))


PLAIN = Variant(TreeShape(()))


@dataclass(slots=True)
class Side:
    """Sums over the runs of one variant, and the answers of the last one."""

    seconds: float = 0.0
    tokens: int = 0
    steps: int = 0
    answers: list[Answer] = field(default_factory=list)

    def add(self, pace: Pace) -> None:
        self.seconds += pace.seconds
        self.tokens += pace.tokens
        self.steps += pace.steps

    @property
    def pace(self) -> Pace:
        return Pace(self.seconds, self.tokens, self.steps)


def compare(
    engine: LocalEngine, prompts: Sequence[Prompt], together: int, variants: Sequence[Variant], args: argparse.Namespace
) -> dict[str, dict[str, Any]]:
    """By variant: plain and speculative pace, their ratio, tokens per step. Runs there and back again."""
    sides = {variant: Side() for variant in (PLAIN, *variants)}
    for variant in sides:
        _warm(engine, prompts[:together], variant, args)
    there = list(sides)
    for variant in (there + there[::-1]) * args.rounds:
        engine.run_shape(variant.shape, variant.draft)
        side = Side()
        sides[variant].answers = _waves(engine, prompts, together, args, side)
        sides[variant].add(side.pace)
        name = "plain" if variant == PLAIN else variant
        print(f"  {together} at once, {name}: {side.pace.tokens_per_second:.1f} tokens/s", file=sys.stderr)
    return {str(variant): _comparison(sides[PLAIN], sides[variant]) for variant in variants}


def _waves(
    engine: LocalEngine, prompts: Sequence[Prompt], together: int, args: argparse.Namespace, side: Side
) -> list[Answer]:
    """Answers to all prompts, ``together`` at a time; an incomplete last wave is left out."""
    answers: list[Answer] = []
    for start in range(0, len(prompts) - together + 1, together):
        wave = range(start, start + together)
        new, pace = engine.answer([prompts[i] for i in wave], [sampling_of(args, i) for i in wave])
        answers += new
        side.add(pace)
    return answers


def _warm(engine: LocalEngine, prompts: Sequence[Prompt], variant: Variant, args: argparse.Namespace) -> None:
    engine.run_shape(variant.shape, variant.draft)
    short = argparse.Namespace(**{**vars(args), "max_tokens": min(args.max_tokens, 8)})
    engine.answer(prompts, [sampling_of(short, index) for index in range(len(prompts))])


def _comparison(plain: Side, speculative: Side) -> dict[str, Any]:
    drafted = speculative.answers
    drafts = sum(answer.drafts for answer in drafted)
    same = sum(a.tokens == b.tokens for a, b in zip(plain.answers, drafted, strict=True))
    return {
        "plain": _pace(plain.pace),
        "speculative": _pace(speculative.pace),
        "ratio": speculative.pace.tokens_per_second / plain.pace.tokens_per_second,
        "tokens_per_step": 1 + sum(answer.accepted for answer in drafted) / drafts if drafts else 1.0,
        "distinct_4grams": distinct_4grams([answer.tokens for answer in drafted]),
        "identical": same == len(drafted),
        "identical_answers": f"{same}/{len(drafted)}",
    }


def _pace(pace: Pace) -> dict[str, float]:
    return {"tokens_per_second": pace.tokens_per_second, "step_milliseconds": pace.step_milliseconds}
