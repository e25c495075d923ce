"""Times of the ways to compute an operation, measured on a GPU by `hack/gpu`, from which operations choose.

The engine loads them before its first step. Without them, operations choose by rules.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FORMAT = 1


class FormatError(ValueError):
    """File of another format."""


@dataclass(frozen=True, slots=True)
class Case:
    """One measured operation: microseconds by way, at a size within a case."""

    key: tuple[Any, ...]
    """Everything that must be equal for the times to apply."""
    size: int
    """Number of rows or tokens."""
    microseconds: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Timings:
    """Times of one GPU."""

    gpu: str = ""
    products: tuple[Case, ...] = ()
    """Products with quantised weights; keys are (kind, outputs, inputs), sizes numbers of rows."""
    prefill: tuple[Case, ...] = ()
    """Attention of prompt chunks; keys are (query heads, key-value heads, head dimension), sizes numbers of keys."""
    digest: str = ""
    """Beginning of the file's SHA-256; empty without a file."""


_current = Timings()


def current() -> Timings:
    """Return the times that operations choose from."""
    return _current


def use(timings: Timings) -> None:
    """Let operations choose from ``timings``. Captured graphs keep the ways that they were captured with."""
    global _current
    _current = timings


def fastest(cases: tuple[Case, ...], key: tuple[Any, ...], size: int, ways: tuple[str, ...]) -> str | None:
    """Return the fastest of ``ways`` at the measured size next above ``size``, else at the largest one.

    Returns:
        None if the key was not measured, or none of the ways.
    """
    mine = sorted((case for case in cases if case.key == key), key=lambda case: case.size)
    if not mine:
        return None
    times = next((case for case in mine if case.size >= size), mine[-1]).microseconds
    return min((way for way in ways if way in times), key=lambda way: times[way], default=None)


def describe(timings: Timings) -> list[str]:
    """Return a line for each measured key: its fastest way at every size."""
    lines: dict[str, list[str]] = {}
    for kind, cases in (("prefill", timings.prefill), ("product", timings.products)):
        for case in sorted(cases, key=lambda case: case.size):
            if times := case.microseconds:
                fastest_way = min(times, key=lambda way: times[way])
                lines.setdefault(f"{kind} {'x'.join(map(str, case.key))}", []).append(f"{case.size}: {fastest_way}")
    return [f"{name}: {', '.join(ways)}" for name, ways in lines.items()]


def read(path: Path) -> Timings:
    """Read the file that `hack/gpu` writes.

    Raises:
        ValueError: the file has another format, or is no such file.
    """
    try:
        text = path.read_bytes()
        body = json.loads(text)
        if body["format"] != FORMAT:
            raise FormatError(f"{path}: format {body['format']} is unknown; measure again with hack/gpu")
        digest = hashlib.sha256(text).hexdigest()[:12]
        return Timings(str(body["gpu"]), _cases(body["products"]), _cases(body["prefill"]), digest)
    except FormatError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{path}: not a file of kernel timings ({error!r})") from error


def _cases(rows: list[dict[str, Any]]) -> tuple[Case, ...]:
    return tuple(
        Case(tuple(row["key"]), int(row["size"]), {str(way): float(took) for way, took in row["microseconds"].items()})
        for row in rows
    )


def written(timings: Timings) -> str:
    """Return the text of the file that `read` reads."""
    return json.dumps(
        {
            "format": FORMAT,
            "gpu": timings.gpu,
            "products": [_row(case) for case in timings.products],
            "prefill": [_row(case) for case in timings.prefill],
        },
        indent=1,
    )


def _row(case: Case) -> dict[str, Any]:
    return {"key": list(case.key), "size": case.size, "microseconds": dict(case.microseconds)}
