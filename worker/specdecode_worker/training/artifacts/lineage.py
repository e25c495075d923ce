"""Lineage of a trained draft: its origin and results, as lineage.json, README.md and curve.png."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from specdecode_worker.training.artifacts.atomic_files import write_text
from specdecode_worker.training.data.batches import DataSet, answer_length
from specdecode_worker.training.data.shards import Conversation, shard_paths
from specdecode_worker.training.optimization.schedule import TrainSettings

_CARD = """# {name}

A draft for speculative decoding (method `{method}`), trained by `specdecode-worker train` for the target
`{target}` ({target_hash}){parent}. Use it for no other target.

## Data

{tokens:,} answer tokens in {conversations:,} conversations, which the target itself said; by domain: {domains}.
Probability of what the draft's vocabulary ({vocabulary:,} tokens) lacks, by domain: {uncovered}.

## Result

Greedy replay of a chain of 3 on {validation} conversations kept apart, after {steps:,} steps ({minutes:.0f} minutes):

| domain | tokens per step | acceptance by depth |
| --- | --- | --- |
{rows}

![tokens per step on validation](curve.png)

Settings, hashes and all validations are in lineage.json.
"""


def lineage(
    *,
    method: str,
    target: tuple[str, str],
    parent: tuple[str, str] | None,
    data: DataSet,
    settings: TrainSettings,
    uncovered: dict[str, float],
    vocabulary: int,
    history: Sequence[dict[str, Any]],
) -> dict[str, Any]:
    """Return the content of lineage.json. ``target`` and ``parent`` are (uri, hash of config and weights)."""
    best = max(history, key=lambda line: line["tokens_per_step"], default={})
    return {
        "method": method,
        "target": {"uri": target[0], "hash": target[1]},
        "parent": {"uri": parent[0], "hash": parent[1]} if parent else None,
        "data": _described(data),
        "vocabulary": {"size": vocabulary, "uncovered": uncovered},
        "settings": asdict(settings),
        "results": best,
        "history": list(history),
    }


def _described(data: DataSet) -> dict[str, Any]:
    """Return a summary of the data.

    ``window`` spans the modification times of the shards. ``hash`` covers the tokens of all conversations.
    """
    every = [*data.training, *data.validation]
    times = [path.stat().st_mtime for path in shard_paths(data.folder)]
    tokens: Counter[str] = Counter()
    for conversation in every:
        tokens[conversation.domain] += answer_length(conversation)
    return {
        "conversations": len(every),
        "validation": len(data.validation),
        "answer_tokens": tokens.total(),
        "by_domain": dict(sorted(tokens.items())),
        "window": [_moment(min(times)), _moment(max(times))] if times else [],
        "hash": _hash(every),
    }


def _hash(conversations: Sequence[Conversation]) -> str:
    """Return 16 hex digits of SHA-256 over the tokens of all conversations."""
    digest = hashlib.sha256()
    for conversation in conversations:
        digest.update(len(conversation.tokens_N).to_bytes(4) + conversation.tokens_N.numpy().tobytes())
    return digest.hexdigest()[:16]


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


def write_card(document: dict[str, Any], folder: Path) -> None:
    """Write README.md, the model card, from the content of lineage.json."""
    data, result, parent = document["data"], document["results"], document["parent"]
    parts = {**result.get("domains", {}), "all": result}
    text = _CARD.format(
        name=folder.parent.name if folder.name == "head" else folder.name,
        method=document["method"],
        target=document["target"]["uri"],
        target_hash=document["target"]["hash"],
        parent=f", going on from `{parent['uri']}` ({parent['hash']})" if parent else "",
        tokens=data["answer_tokens"],
        conversations=data["conversations"],
        domains=", ".join(f"{name} {count:,}" for name, count in data["by_domain"].items()),
        vocabulary=document["vocabulary"]["size"],
        uncovered=", ".join(f"{name} {share:.1%}" for name, share in document["vocabulary"]["uncovered"].items()),
        validation=data["validation"],
        steps=result.get("step", 0),
        minutes=result.get("minutes", 0.0),
        rows="\n".join(_row(name, part) for name, part in parts.items() if part),
    )
    write_text(folder / "README.md", text)


def _row(name: str, part: dict[str, Any]) -> str:
    acceptance = " ".join(f"{share:.2f}" for share in part["acceptance"])
    return f"| {name} | {part['tokens_per_step']:.2f} | {acceptance} |"


def write_curve(history: Sequence[dict[str, Any]], path: Path) -> bool:
    """Plot tokens per step over minutes, overall and by domain. Return False if matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    axes = (figure := Figure(figsize=(7, 4))).add_subplot()
    minutes = [line["minutes"] for line in history]
    for name in sorted({name for line in history for name in line["domains"]}):
        values = [line["domains"].get(name, {}).get("tokens_per_step") for line in history]
        axes.plot(minutes, values, linewidth=0.8, alpha=0.6, label=name)
    axes.plot(minutes, [line["tokens_per_step"] for line in history], "k.-", label="all")
    axes.set_xlabel("minutes of training")
    axes.set_ylabel("tokens per step, chain of 3")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=7, ncols=2)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    return True
