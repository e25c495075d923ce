"""``eval --sampler coupled,mss``: acceptance of both samplers side by side, on the same prompts and seeds.

Coupled sampling says the same text whatever the shape; multi-round sampling says another of the same law. Acceptance
does not depend on the machine's speed, so nothing is timed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import sqrt
from pathlib import Path
from typing import Any

from specdecode_worker.commands.common.local_engine import LocalEngine, Prompt, distinct_4grams, local_engine
from specdecode_worker.contract import Sampler, TreeShape
from specdecode_worker.engine.ipc.messages import Sampling, Tokens

SHAPES = {text: TreeShape.parse(text) for text in ("chain:3", "tree:3,2,1")}
TEMPERATURES = (0.3, 0.6, 0.8, 1.0, 1.2)
_CONCURRENCY = 8


@dataclass(slots=True)
class Walks:
    """Accepted nodes of every verified tree, by request."""

    accepted: list[list[int]]
    _sums: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, requests: int) -> Walks:
        return cls([[] for _ in range(requests)], [0] * requests)

    def take(self, index: int, new: Tokens) -> None:
        if new.drafts > len(self.accepted[index]):
            self.accepted[index].append(new.accepted - self._sums[index])
            self._sums[index] = new.accepted

    @property
    def tokens_per_step(self) -> float:
        return 1 + sum(map(sum, self.accepted)) / max(self.steps, 1)

    @property
    def steps(self) -> int:
        return sum(map(len, self.accepted))

    @property
    def standard_error(self) -> float:
        """Of tokens per step, with errors by request: steps of one text are correlated."""
        mean = self.tokens_per_step - 1
        return sqrt(sum((sum(walks) - mean * len(walks)) ** 2 for walks in self.accepted)) / max(self.steps, 1)

    def by_depth(self, depth: int) -> list[float]:
        """Share of steps that accepted a node of each depth, of those that accepted its parent."""
        walks = [count for request in self.accepted for count in request]
        reached = [sum(count >= level for count in walks) for level in range(depth + 1)]
        return [after / max(before, 1) for before, after in pairwise(reached)]


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """From the flags of ``eval``. Raises ValueError, ModelError and what reading prompts raises."""
    shapes = SHAPES if args.shape is None else {str(args.shape): args.shape}
    cells: list[dict[str, Any]] = []
    prompts: list[Prompt] = []
    for sampler in args.sampler:
        engine = local_engine(args, max_num_seqs=_CONCURRENCY, sampler=sampler)
        prompts = engine.prompts(Path(args.prompts))
        for name, shape in shapes.items():
            for temperature in args.temperature:
                figures = _figures(engine, prompts, shape, temperature, args.max_tokens)
                cells.append({"sampler": sampler, "shape": name, "temperature": temperature, **figures})
                print(f"eval: {line(cells[-1])}", file=sys.stderr, flush=True)
    return {"prompts": len(prompts), "max_tokens": args.max_tokens, "cells": cells}


def _figures(
    engine: LocalEngine, prompts: Sequence[Prompt], shape: TreeShape, temperature: float, most: int
) -> dict[str, Any]:
    engine.run_shape(shape)
    walks = Walks.of(len(prompts))
    how = [Sampling(max_tokens=most, temperature=temperature, seed=seed) for seed in range(len(prompts))]
    answers, _ = engine.answer(prompts, how, walks.take)
    return {
        "tokens_per_step": round(walks.tokens_per_step, 4),
        "standard_error": round(walks.standard_error, 4),
        "acceptance": [round(share, 4) for share in walks.by_depth(max(shape.depths))],
        "steps": walks.steps,
        "distinct_4grams": round(distinct_4grams([answer.tokens for answer in answers]), 4),
    }


def line(cell: dict[str, Any]) -> str:
    acceptance = " ".join(f"{share:.2f}" for share in cell["acceptance"])
    return (
        f"{cell['shape']:12} {cell['temperature']:4.1f} {cell['sampler']:8} {cell['tokens_per_step']:11.3f} "
        f"{cell['standard_error']:6.3f}  {acceptance}"
    )


def table(document: dict[str, Any]) -> str:
    """Samplers below each other, shape by shape and temperature by temperature."""
    head = f"{'shape':12} {'T':>4} {'sampler':8} {'tokens/step':>11} {'+-':>6}  acceptance by depth"
    cells = sorted(document["cells"], key=lambda cell: (cell["shape"], cell["temperature"]))
    return "\n".join([head, *map(line, cells)])


def samplers(text: str) -> tuple[Sampler, ...]:
    """``coupled,mss``"""
    names: dict[str, Sampler] = {"coupled": "coupled", "mss": "mss"}
    unknown = [name for name in text.split(",") if name not in names]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is no sampler; write coupled, mss or coupled,mss")
    return tuple(names[name] for name in text.split(","))


def temperatures(text: str) -> tuple[float, ...]:
    """``0.3,0.6,1``"""
    try:
        return tuple(float(value) for value in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of temperatures; write 0.3,0.6,1.0") from None
