"""Step times of simulated workers: tables recorded of the real worker, or composed of published figures.

Not the planner's model: a table over (sequences, depth, context) with interpolation in logarithms, and noise that is
replayed from recorded steps, in the order in which it came.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

DEPTHS = 8
"""Depths 0 to 7 are recorded."""
NODES = (*range(DEPTHS), 11, 16, 32, 64)
"""Draft tokens of a sequence in the tables. The first are chains; trees of more nodes make as many passes as the last
of them."""
_CONTEXTS = (128.0, 512.0, 1024.0, 4096.0, 8192.0, 16384.0)
_SEQUENCES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)


@dataclass(slots=True)
class StepTable:
    """Seconds of a step. ``grid`` is [sequences, NODES, context]; the axes of sequences and context are logarithmic."""

    name: str
    sequences: tuple[float, ...]
    contexts: tuple[float, ...]
    grid: list[list[list[float]]]
    pass_seconds: tuple[float, ...]
    """One draft pass, by the axis of sequences."""
    chunk_tokens: tuple[float, ...]
    chunk_seconds: tuple[float, ...]
    """Seconds of a prompt chunk of ``chunk_tokens`` tokens that runs alone."""
    noise: tuple[float, ...]
    """Seconds over typical seconds of steps in a row, of mean 1."""
    speculation_seconds: float = 0.0
    """Part of a step with drafts, however few of its sequences have any. ``grid`` includes it."""
    _sums: Any = field(init=False)
    _squares: Any = field(init=False)

    def __post_init__(self) -> None:
        looped = np.array(self.noise * (1 + 256 // len(self.noise)) + self.noise)
        self._sums = np.concatenate(([0.0], np.cumsum(looped))).tolist()
        self._squares = np.concatenate(([0.0], np.cumsum(looped**2))).tolist()

    def seconds(self, sequences: float, verify_tokens: float, passes: float, kv_tokens: float) -> float:
        """Return the time of a step without noise. ``verify_tokens`` includes the roots."""
        return self.at_load(sequences, kv_tokens)(verify_tokens, passes)

    def at_load(self, sequences: float, kv_tokens: float) -> Callable[[float, float], float]:
        """Return the time of a step of so many sequences by its verified tokens and its passes."""
        sequences = max(sequences, 0.5)
        b, v = _place(self.sequences, sequences)
        c, w = _place(self.contexts, kv_tokens / sequences)
        low, high, known = self.grid[b], self.grid[b + 1], dict[int, float]()
        one_pass = (1 - v) * self.pass_seconds[b] + v * self.pass_seconds[b + 1]

        def of_nodes(d: int) -> float:
            if d not in known:
                known[d] = (1 - v) * _blend(low[d], c, w) + v * _blend(high[d], c, w)
            return known[d]

        def seconds(verify_tokens: float, passes: float) -> float:
            nodes = min(max(verify_tokens / sequences - 1.0, 0.0), NODES[-1])
            d = min(bisect_right(NODES, nodes), len(NODES) - 1) - 1
            u = (nodes - NODES[d]) / (NODES[d + 1] - NODES[d])
            seconds_per_step = (1 - u) * of_nodes(d) + u * of_nodes(d + 1)
            if passes > 0 and nodes < 1:
                seconds_per_step += (1 - nodes) * self.speculation_seconds
            more = passes - min(nodes, DEPTHS - 1.0)
            if abs(more) > 1e-9:
                seconds_per_step += more * one_pass
            return float(max(seconds_per_step, 1e-5))

        return seconds

    def prefill_seconds(self, tokens: float) -> float:
        """Return the seconds that a chunk of this many prompt tokens adds to a step."""
        at = max(0, min(len(self.chunk_tokens) - 2, bisect_right(self.chunk_tokens, tokens) - 1))
        x0, x1 = self.chunk_tokens[at], self.chunk_tokens[at + 1]
        y0, y1 = self.chunk_seconds[at], self.chunk_seconds[at + 1]
        return max(0.0, y0 + (y1 - y0) * (tokens - x0) / (x1 - x0))

    def noisy(self, offset: int, steps: int) -> tuple[float, float]:
        """(mean, mean of squares) of the noise of ``steps`` (at most 256) steps in a row, from ``offset`` on."""
        at = offset % len(self.noise)
        total = self._sums[at + steps] - self._sums[at]
        squares = self._squares[at + steps] - self._squares[at]
        return total / steps, squares / steps


def _place(axis: tuple[float, ...], value: float) -> tuple[int, float]:
    """Index of the cell that holds ``value`` and where in it, on a logarithmic axis; beyond the ends it is clamped."""
    value = min(max(value, axis[0]), axis[-1])
    at = min(bisect_right(axis, value) - 1, len(axis) - 2)
    return at, math.log(value / axis[at]) / math.log(axis[at + 1] / axis[at]) if value > axis[at] else 0.0


def _blend(row: list[float], at: int, share: float) -> float:
    return (1 - share) * row[at] + share * row[at + 1]


def recorded(document: Mapping[str, Any]) -> StepTable:
    """Return the table of benchmarks/record_steps.py. Unrecorded large cells follow the recorded slope."""
    cells = {(c["sequences"], c["context"], c["depth"]): c["seconds"] for c in document["cells"]}
    sequences = sorted({key[0] for key in cells})
    contexts = sorted({key[1] for key in cells})
    passes = _passes(cells, sequences, contexts[0])
    grid = [
        _rising([[_cell(cells, sequences, b, contexts, c, d) for c in contexts] for d in range(DEPTHS)], one_pass)
        for b, one_pass in zip(sequences, passes, strict=True)
    ]
    chunks: dict[float, list[float]] = {}
    for chunk in document["chunks"]:
        if chunk["sequences"] <= 1:
            chunks.setdefault(float(chunk["tokens"]), []).append(chunk["seconds"])
    tokens = sorted(chunks)
    noise = np.clip(np.array(document["series"]), 0.5, 4.0)
    return StepTable(
        name="smollm2-cpu",
        sequences=tuple(map(float, sequences)),
        contexts=tuple(map(float, contexts)),
        grid=grid,
        pass_seconds=passes,
        chunk_tokens=(0.0, *tokens),
        chunk_seconds=(0.0, *(float(np.median(chunks[t])) for t in tokens)),
        noise=tuple((noise / noise.mean()).tolist()),
    )


def _cell(
    cells: Mapping[tuple[int, int, int], float], sequences: list[int], b: int, contexts: list[int], c: int, d: int
) -> float:
    """Recorded; else what the longest recorded context of as many sequences has, and the slope of fewer for the rest.

    A short context that was left out lies between its neighbours in sequences.
    """
    if (b, c, d) in cells:
        return cells[b, c, d]
    longer = [other for other in contexts if other > c and (b, other, d) in cells]
    if longer:
        return cells[b, longer[0], d]
    known = max(other for other in contexts if (b, other, d) in cells)
    fewer = max(n for n in sequences if (n, c, d) in cells and (n, known, d) in cells)
    slope = max(0.0, cells[fewer, c, d] - cells[fewer, known, d]) / fewer
    return cells[b, known, d] + slope * b


def _rising(rows: list[list[float]], one_pass: float) -> list[list[float]]:
    """A longer context never makes a step cheaper, whatever a busy minute did to a median.

    More nodes than a chain has go on as the later half of the chains does, without their passes.
    """
    rising = np.maximum.accumulate(rows, axis=1)
    half = DEPTHS // 2
    token = np.maximum((rising[-1] - rising[-1 - half]) / half - one_pass, 0.0)
    wide = [(rising[-1] + (nodes - DEPTHS + 1) * token).tolist() for nodes in NODES[DEPTHS:]]
    return [*rising.tolist(), *wide]


def _passes(cells: Mapping[tuple[int, int, int], float], sequences: list[int], context: int) -> tuple[float, ...]:
    """One draft pass: a chain's step less a plain step of as many tokens, by pass; carried where there is no such."""
    passes: list[float] = []
    for b in sequences:
        own = [
            (cells[b, context, d] - cells[b * (d + 1), context, 0]) / d
            for d in range(1, DEPTHS)
            if (b * (d + 1), context, 0) in cells
        ]
        previous = passes[-1] if passes else 1e-4
        passes.append(max(float(np.median(own)), 1e-4) if own else 1.5 * previous)
    return tuple(passes)


def published(document: Mapping[str, Any]) -> dict[str, StepTable]:
    """Return a table per device from benchmarks/recordings/steps-composed.json, composed as that file says."""
    return {name: _composed(name, device) for name, device in document["devices"].items()}


def _composed(name: str, device: Mapping[str, Any]) -> StepTable:
    token, experts = device["token_seconds"], device.get("experts", 1)

    def step(sequences: float, nodes: int, context: float) -> float:
        tokens, depth = sequences * (nodes + 1), min(nodes, DEPTHS - 1)
        chosen = experts * (1 - (1 - 1 / experts) ** tokens)
        weights = device["weights_seconds"] + chosen * device.get("expert_seconds", 0.0)
        networks = (weights**3 + (token * tokens) ** 3) ** (1 / 3)
        speculation = device["speculation_seconds"] + depth * draft(sequences, context) if depth else 0.0
        kv = device["kv_token_seconds"] * sequences * context * (1 + device.get("kv_node_share", 0.0) * nodes)
        return float(device["overhead_seconds"] + networks + kv + speculation)

    def draft(sequences: float, context: float = _CONTEXTS[0]) -> float:
        kv = device.get("pass_kv_token_seconds", 0.0) * context
        return float(device["pass_seconds"] + (device["pass_sequence_seconds"] + kv) * sequences)

    grid = [[[step(b, n, c) for c in _CONTEXTS] for n in NODES] for b in _SEQUENCES]
    chunk = (0.0, 128.0, 512.0, 2048.0, 8192.0)
    generator = np.random.default_rng(0)
    noise = 1 + device["noise"] * generator.standard_normal(512) + (generator.random(512) < 0.01)
    return StepTable(
        name=name,
        sequences=_SEQUENCES,
        contexts=_CONTEXTS,
        grid=grid,
        pass_seconds=tuple(draft(b) for b in _SEQUENCES),
        chunk_tokens=chunk,
        chunk_seconds=tuple(token * tokens for tokens in chunk),
        noise=tuple((noise / noise.mean()).tolist()),
        speculation_seconds=device["speculation_seconds"],
    )
