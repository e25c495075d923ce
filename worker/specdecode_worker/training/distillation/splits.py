"""Train, validation and test splits of captured conversations, without overlap; pure functions over token ids.

The split of a conversation is a hash of its opening user text, so it is the same in every generation of a draft and on
every machine. Texts with different openings may still share passages. A text that shares a run of 13 tokens with a text
of a split used for evaluation is dropped.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Split = Literal["train", "validation", "test"]
SHARES: tuple[tuple[Split, float], ...] = (("test", 0.1), ("validation", 0.1), ("train", 0.8))
"""Shares of the splits, in order of precedence.

They must never change: drafts in use were trained on the training texts that these shares define.
"""
NGRAM_TOKENS = 13
_COMMON = (3, 0.05)
"""Limits (count, share) of conversations of a task: a run in the prompts of more than both belongs to the task's frame.
"""

Runs = NDArray[np.uint64]
"""Hashes of runs of tokens, sorted and unique."""


def split_of(opening: str) -> Split:
    """Return the split of a conversation by the hash of its opening (``capture.opening_hash``)."""
    # The opening is hashed again, so that the split is independent of any other decision made by its digits.
    drawn = int.from_bytes(hashlib.sha256(f"split/{opening}".encode()).digest()[:8]) / 2**64
    for split, share in SHARES:
        drawn -= share
        if drawn < 0:
            return split
    return SHARES[-1][0]


def runs_of(tokens: Sequence[int], size: int = NGRAM_TOKENS) -> Runs:
    """Return the hashes of all runs of ``size`` tokens. A shorter text counts as one run."""
    return np.unique(_windows(tokens, min(size, len(tokens))))


def _windows(tokens: Sequence[int], size: int) -> Runs:
    """Return the hash of the run of ``size`` tokens that begins at each token, in order."""
    if not 0 < size <= len(tokens):
        return np.empty(0, np.uint64)
    ids = _mixed(np.asarray(tokens, np.uint64) + np.uint64(1))
    hashes = np.zeros(len(ids) - size + 1, np.uint64)
    for i in range(size):
        # A polynomial modulo 2^64 over mixed ids. A collision only drops a text without need.
        hashes = hashes * np.uint64(0x9E3779B97F4A7C15) + ids[i : len(ids) - size + 1 + i]
    return hashes


def _mixed(x: Runs) -> Runs:
    """Return ``x`` mixed by SplitMix64's finalizer (Steele, Lea, Flood 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@dataclass(frozen=True, slots=True)
class Text:
    """Record as the overlap check needs it: the prompt's tokens, the answer's runs, its conversation and domain."""

    conversation: str
    domain: str
    prompt: Sequence[int]
    answer: Runs


def frames(texts: Iterable[Text]) -> dict[str, Runs]:
    """Return by domain the runs around the user text: chat template, system prompt, a task's instructions."""
    conversations: dict[str, dict[str, list[Runs]]] = defaultdict(lambda: defaultdict(list))
    for text in texts:
        conversations[text.domain][text.conversation].append(np.unique(_windows(text.prompt, NGRAM_TOKENS)))
    runs_by_domain = {}
    for domain, prompts in conversations.items():
        counts = Counter(int(run) for parts in prompts.values() for run in np.unique(np.concatenate(parts)))
        most = max(_COMMON[0], _COMMON[1] * len(prompts))
        runs_by_domain[domain] = np.array(sorted(run for run, count in counts.items() if count > most), np.uint64)
    return runs_by_domain


def exclusive_runs(text: Text, frame: Mapping[str, Runs]) -> Runs:
    """Return the runs of a text that must occur in one split only.

    They are the runs of the answer, the prompt as a whole, and the runs of the prompt's parts outside its frame. Runs
    that are partly frame are left out: they would match two different questions that only begin with the same words.
    """
    windows = _windows(text.prompt, NGRAM_TOKENS)
    framed_N = np.zeros(len(text.prompt), bool)
    for at in np.flatnonzero(np.isin(windows, frame.get(text.domain, windows[:0]))):
        framed_N[at : at + NGRAM_TOKENS] = True
    left = [[text.prompt[i] for i in piece] for piece in _stretches(np.flatnonzero(~framed_N))]
    parts = [runs_of(piece) for piece in left if len(piece) >= NGRAM_TOKENS]
    return union_of_runs([text.answer, runs_of(text.prompt, len(text.prompt)), *parts])


def _stretches(places: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Return ``places`` divided into stretches of consecutive positions."""
    return np.split(places, np.flatnonzero(np.diff(places) > 1) + 1) if len(places) else []


def overlapping(texts: Sequence[Text], splits: Sequence[Split], judged: Runs | None = None) -> list[bool]:
    """Return for each text whether to drop it, so that no run of tokens occurs in two splits.

    Test texts are dropped only for ``judged``, the runs of the golden set. Validation texts are also dropped for test
    texts, training texts for both.
    """
    frame = frames(texts)
    own = [exclusive_runs(text, frame) for text in texts]
    taken = np.empty(0, np.uint64) if judged is None else judged
    dropped = [False] * len(texts)
    for split, _ in SHARES:
        here = [i for i, other in enumerate(splits) if other == split]
        for i in here:
            dropped[i] = shares_run(own[i], taken)
        taken = union_of_runs([taken, *(own[i] for i in here if not dropped[i])])
    return dropped


def union_of_runs(parts: Sequence[Runs]) -> Runs:
    """Return the union of ``parts``."""
    return np.unique(np.concatenate([np.empty(0, np.uint64), *parts]))


def shares_run(mine: Runs, theirs: Runs) -> bool:
    """Return whether the two sets of runs have one in common."""
    if not len(theirs) or not len(mine):
        return False
    at = np.minimum(np.searchsorted(theirs, mine), len(theirs) - 1)
    return bool((theirs[at] == mine).any())
