"""Report of `guided_schemas.py`: tables from its output file."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def report(path: Path) -> str:
    """Return the tables of an output file: one line for each way, then tokens per step and ends by class."""
    groups = [json.loads(line) for line in path.read_text().splitlines()]
    ways: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for group in groups:
        for name, row in group["ways"].items():
            ways[name].append(row)
    return "\n".join([_by_way(ways), "", _by_class(ways)])


def _by_way(ways: dict[str, list[dict[str, Any]]]) -> str:
    """Return the table with one line for each way."""
    head = (
        "| drafts | answers | ended | of these valid | errors | other text than plain | tokens per step "
        "| preemptions | masks, share of time | µs per mask |"
    )
    lines = [head, "|" + " --- |" * 10]
    for name, rows in ways.items():
        total = _counts(answer for row in rows for answer in row["answers"])
        seconds, masked = (sum(row[key] for row in rows) for key in ("seconds", "mask_seconds"))
        masks, preemptions = (sum(row[key] for row in rows) for key in ("masks", "preemptions"))
        lines.append(
            f"| {name} | {total['answers']} | {_share(total['ended'], total['answers'])} | {total['valid']} "
            f"| {total['errors']} | {total['other']} | {_ratio(total)} | {preemptions} "
            f"| {100 * masked / seconds:.1f} % | {1e6 * masked / max(masks, 1):.0f} |"
        )
    return "\n".join(lines)


def _by_class(ways: dict[str, list[dict[str, Any]]]) -> str:
    """Return the table with one line for each class: ends of plain decoding, and tokens per step of every way."""
    counts: dict[tuple[str, str], Counter[str]] = {}
    for name, rows in ways.items():
        answers = [answer for row in rows for answer in row["answers"]]
        for kind in {answer["kind"] for answer in answers}:
            counts[name, kind] = _counts(answer for answer in answers if answer["kind"] == kind)
    first = next(iter(ways))
    lines = [f"| class | answers | ended | cut off | {' | '.join(ways)} |", "|" + " --- |" * (4 + len(ways))]
    for kind in sorted({kind for _, kind in counts}):
        plain = counts[first, kind]
        ratios = " | ".join(_ratio(counts[name, kind]) for name in ways)
        ended = _share(plain["ended"], plain["answers"])
        lines.append(f"| {kind} | {plain['answers']} | {ended} | {plain['answers'] - plain['ended']} | {ratios} |")
    return "\n".join(lines)


def _counts(answers: Iterable[dict[str, Any]]) -> Counter[str]:
    """Return the sums over answers."""
    total: Counter[str] = Counter()
    for answer in answers:
        total["answers"] += 1
        total["ended"] += answer["finish"] == "stop"
        total["valid"] += answer["valid"]
        total["errors"] += answer["finish"] not in ("stop", "length")
        total["other"] += not answer["same"]
        total["tokens"] += answer["tokens"]
        total["steps"] += answer["steps"]
    return total


def _ratio(total: Counter[str]) -> str:
    return f"{total['tokens'] / max(total['steps'], 1):.2f}"


def _share(part: int, whole: int) -> str:
    return f"{part} ({100 * part / max(whole, 1):.0f} %)"
