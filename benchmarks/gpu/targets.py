"""What must be shown, as a table in code, and what rows say of it. Pure: rows in, verdicts out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]
Found = Iterator[tuple[str, float | None, bool]]
"""(case, measured, synthetic)"""


@dataclass(frozen=True, slots=True)
class Target:
    """``bound`` is the most that ``of`` may find, or the least where ``at_least``."""

    name: str
    bound: float
    of: Callable[[Sequence[Row]], Found]
    at_least: bool = False


@dataclass(frozen=True, slots=True)
class Verdict:
    """``met`` None: nothing was measured."""

    target: str
    case: str
    bound: float
    at_least: bool
    measured: float | None
    met: bool | None
    synthetic: bool


def judge(rows: Sequence[Row]) -> list[Verdict]:
    """Every target has a verdict at least, also where nothing was measured."""
    found = []
    for target in TARGETS:
        cases = list(target.of(rows)) or [("not measured", None, False)]
        for case, measured, synthetic in cases:
            met = None
            if measured is not None:
                met = measured >= target.bound if target.at_least else measured <= target.bound
            found.append(Verdict(target.name, case, target.bound, target.at_least, measured, met, synthetic))
    return found


def _steps(rows: Sequence[Row], kind: str = "step") -> list[Row]:
    """Of Llama-3.1-8B, as it is served: with graphs where the engine has them, the draft in bf16."""
    mine = [row for row in rows if row["kind"] == kind and row["stage"] == "engine-8b"]
    return sorted(mine, key=lambda row: (row["batch"], row["shape"]))


def _roofline(shape: str, batches: Callable[[int], bool] = lambda batch: True) -> Callable[[Sequence[Row]], Found]:
    def of(rows: Sequence[Row]) -> Found:
        for row in _steps(rows):
            if row["shape"] == shape and batches(row["batch"]) and "over_roofline" in row:
                yield f"batch {row['batch']}", row["over_roofline"], row["synthetic"]

    return of


def _flash_decode(rows: Sequence[Row]) -> Found:
    """Over an unmasked decode of the same prefix, where FlashInfer is installed."""
    for row in rows:
        if row["kind"] == "attention" and row["flash_decode_microseconds"]:
            yield _attention_case(row), row["microseconds"] / row["flash_decode_microseconds"], False


def _copy_share(rows: Sequence[Row]) -> Found:
    """Where it is not."""
    for row in rows:
        if row["kind"] == "attention" and not row["flash_decode_microseconds"] and "share_of_copy_rate" in row:
            yield _attention_case(row), row["share_of_copy_rate"], False


def _flex(rows: Sequence[Row]) -> Found:
    ours = {_attention_case(row): row["microseconds"] for row in rows if row["kind"] == "attention"}
    for row in rows:
        if row["kind"] == "flex" and (case := _attention_case(row)) in ours:
            yield case, ours[case] / row["microseconds"], False


def _attention_case(row: Row) -> str:
    return f"batch {row['batch']}, {row['context']} tokens, {row['nodes']} nodes"


def _sampling(rows: Sequence[Row]) -> Found:
    """The choice of as many tokens as the largest batch has texts, over its plain step."""
    choices = {row["rows"]: row["choice_microseconds"] for row in rows if row["kind"] == "sampling"}
    plain = [row for row in _steps(rows) if row["shape"] == "plain" and row["batch"] in choices]
    if plain:
        row = plain[-1]
        yield f"batch {row['batch']}", choices[row["batch"]] / 1e3 / row["step_milliseconds"], False


def _products(rows: Sequence[Row]) -> Found:
    for row in rows:
        if row["kind"] == "product":
            yield f"{row['matrix']}, {row['rows']} rows", row["over_library"], False


def _speedup(rows: Sequence[Row]) -> Found:
    for row in _steps(rows, "speedup"):
        yield f"batch {row['batch']}", row["speedup"], row["synthetic"]


TARGETS = (
    Target("plain step over its roofline, batch 1", 1.10, _roofline("plain", lambda batch: batch == 1)),
    Target("plain step over its roofline", 1.25, _roofline("plain", lambda batch: batch > 1)),
    Target("step of chain:5 over target once + draft five times", 1.15, _roofline("chain:5")),
    Target("tree attention over FlashInfer's unmasked decode", 1.1, _flash_decode),
    Target("tree attention, share of the copy rate (no FlashInfer)", 0.85, _copy_share, at_least=True),
    Target("tree attention over FlexAttention", 1.0, _flex),
    Target("fused product over the library's and its surroundings", 1.0, _products),
    Target("sampling, share of a plain step", 0.03, _sampling),
    Target("chain:3 over own plain decoding, 8k context, published acceptance", 1.4, _speedup, at_least=True),
)
