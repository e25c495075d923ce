"""Command ``eval --sampler coupled,mss``: acceptance of samplers on the same prompts and seeds.

Coupled sampling emits the same text with every shape. Multi-round sampling emits other text from the same distribution.
Acceptance does not depend on the speed of the machine, so nothing is timed.
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

from specdecode_worker.commands.local_engine import LocalEngine, TokenizedPrompt, distinct_4grams, local_engine
from specdecode_worker.contract import TreeShape
from specdecode_worker.core.messages import Sampling, Tokens

SHAPES = {text: TreeShape.parse(text) for text in ("chain:3", "tree:3,2,1")}
TEMPERATURES = (0.3, 0.6, 0.8, 1.0, 1.2)
_CONCURRENCY = 8


@dataclass(slots=True)
class Walks:
    """Number of accepted nodes of each verified tree, by request."""

    accepted: list[list[int]]
    _sums: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, requests: int) -> Walks:
        """Return empty counts for this many requests."""
        return cls([[] for _ in range(requests)], [0] * requests)

    def take(self, index: int, new: Tokens) -> None:
        """Record the step of request ``index`` if it verified a tree."""
        if new.drafts > len(self.accepted[index]):
            self.accepted[index].append(new.accepted - self._sums[index])
            self._sums[index] = new.accepted

    @property
    def tokens_per_step(self) -> float:
        """Mean number of tokens per speculative step."""
        return 1 + sum(map(sum, self.accepted)) / max(self.steps, 1)

    @property
    def steps(self) -> int:
        """Number of speculative steps."""
        return sum(map(len, self.accepted))

    @property
    def standard_error(self) -> float:
        """Standard error of the tokens per step, clustered by request, because steps of one text are correlated."""
        mean = self.tokens_per_step - 1
        return sqrt(sum((sum(walks) - mean * len(walks)) ** 2 for walks in self.accepted)) / max(self.steps, 1)

    def by_depth(self, depth: int) -> list[float]:
        """Return the acceptance rate by depth: the share of steps that accepted a node, if its parent was accepted."""
        walks = [count for request in self.accepted for count in request]
        reached = [sum(count >= level for count in walks) for level in range(depth + 1)]
        return [after / max(before, 1) for before, after in pairwise(reached)]


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """Measure every sampler, shape and temperature given by the flags of ``eval``.

    Raises:
        ValueError: The flags contradict each other, or a prompt is invalid.
        ModelError: A model cannot be fetched or loaded.
        OSError: The prompts file cannot be read.
    """
    shapes = SHAPES if args.shape is None else {str(args.shape): args.shape}
    cells: list[dict[str, Any]] = []
    prompts: list[TokenizedPrompt] = []
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
    engine: LocalEngine, prompts: Sequence[TokenizedPrompt], shape: TreeShape, temperature: float, most: int
) -> dict[str, Any]:
    """Return the results of one shape and temperature; ``most`` is the largest length of an answer in tokens."""
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
    """Format one result as a table row."""
    acceptance = " ".join(f"{share:.2f}" for share in cell["acceptance"])
    return (
        f"{cell['shape']:12} {cell['temperature']:4.1f} {cell['sampler']:8} {cell['tokens_per_step']:11.3f} "
        f"{cell['standard_error']:6.3f}  {acceptance}"
    )


def table(document: dict[str, Any]) -> str:
    """Format all results as a table, ordered by shape, temperature and sampler."""
    head = f"{'shape':12} {'T':>4} {'sampler':8} {'tokens/step':>11} {'+-':>6}  acceptance by depth"
    cells = sorted(document["cells"], key=lambda cell: (cell["shape"], cell["temperature"]))
    return "\n".join([head, *map(line, cells)])
