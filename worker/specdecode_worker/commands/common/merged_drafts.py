"""Flag ``--merge``: drafts that propose into the trees of the draft together with it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import get_args

from pydantic import ValidationError

from specdecode_worker.contract import (
    DRAFT_FREE,
    MAX_DEPTH,
    MAX_MERGED,
    MergedDraft,
    Method,
    NamedDraft,
    Placement,
    Sampler,
)


def add_merge_flag(parser: argparse.ArgumentParser) -> None:
    """Add --merge."""
    parser.add_argument(
        "--merge",
        action="append",
        default=[],
        metavar="METHOD[:DEPTH]|METHOD=URI",
        help="draft whose proposals are merged with those of the draft: ngram or suffix, which extends the tree to "
        f"DEPTH without draft passes, or another draft by its URI; at most {MAX_MERGED}",
    )


def merged_drafts(
    words: Sequence[str], method: str, sampler: Sampler, placement: Placement
) -> tuple[tuple[NamedDraft, ...], tuple[MergedDraft, ...]]:
    """Return the drafts that the values of --merge name, and how they are merged.

    Raises:
        ValueError: A value is invalid, or the drafts cannot be merged; the message names the flag.
    """
    if words and method == "none":
        raise ValueError("--merge needs a draft to merge with; give --method or --draft")
    if words and sampler != "coupled":
        raise ValueError(f"--merge needs --sampler coupled; {sampler} knows the distribution of one draft alone")
    if words and placement == "own":
        raise ValueError("--merge needs --draft-placement shared; a draft on a device of its own drafts whole trees")
    if len(words) > MAX_MERGED:
        raise ValueError(f"--merge: at most {MAX_MERGED} drafts are merged with the first one, got {len(words)}")
    drafts = tuple(_draft(word, f"merged-{index}") for index, word in enumerate(words, start=1))
    depths = (word.partition("=")[0].partition(":")[2] for word in words)
    return drafts, tuple(
        MergedDraft(draft=draft.name, depth=int(depth or 0)) for draft, depth in zip(drafts, depths, strict=True)
    )


def _draft(word: str, name: str) -> NamedDraft:
    """Return the draft of one value of --merge. Raise ValueError if it is invalid."""
    kind, _, uri = word.partition("=")
    method, _, depth = kind.partition(":")
    if method not in get_args(Method) or method == "none" or (method in DRAFT_FREE) == bool(uri):
        raise ValueError(f"--merge {word!r}: write ngram, suffix, ngram:8, or a method and a draft like eagle3=URI")
    if depth and (uri or not depth.isdecimal() or int(depth) > MAX_DEPTH):
        raise ValueError(f"--merge {word!r}: a depth is a number up to {MAX_DEPTH}, for ngram and suffix alone")
    try:
        return NamedDraft.model_validate({"name": name, "method": method, "uri": uri or None})
    except ValidationError as error:
        raise ValueError(f"--merge {word!r}: {error.errors()[0]['msg']}") from None
