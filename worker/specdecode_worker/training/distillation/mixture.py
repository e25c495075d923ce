"""What a round of distillation is made of, and what follows from the rounds before: pure functions of their lines.

A round mixes captured conversations with replayed ones of the parent's training text. The seed and the lines of the
rounds so far decide everything, and stand in the checkpoint: a run that was stopped goes on as it would have.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from specdecode_worker.training.data.batches import answer_length
from specdecode_worker.training.data.shards import Conversation

FALL = 0.01
"""An old domain that loses so much against the deployed draft is replayed more."""
REPLAY_STEP, MOST_REPLAY = 0.1, 0.8
LEAST_PROGRESS = 0.001
"""A round that gains less than this on the best is no progress."""


@dataclass(frozen=True, slots=True)
class Line:
    """Validation after a round (the first: before any): tokens per step by domain, captured and old ones apart.
    ``old_mean`` is over all old texts: a domain may have few of them, and its pace then jumps by chance."""

    step: int
    captured: Mapping[str, float]
    old: Mapping[str, float]
    old_mean: float = 1.0


def mix_pace(line: Line, weights: Mapping[str, float]) -> float:
    """Tokens per step over the traffic's mix: shares of tokens, so steps add up. 1 where nothing was captured."""
    steps = sum(weights.get(domain, 0.0) / pace for domain, pace in line.captured.items())
    total = sum(weights.get(domain, 0.0) for domain in line.captured)
    return total / steps if steps else 1.0


def worst_fall(line: Line, first: Line) -> float:
    """How much the old domain that lost most has lost against the deployed draft, as a share."""
    return max([0.0, *(1 - pace / first.old[domain] for domain, pace in line.old.items() if domain in first.old)])


def replay_share(lines: Sequence[Line], start: float) -> float:
    """The share of replay in the next round: more after every round that left an old domain fallen. 0 stays 0."""
    falls = sum(worst_fall(line, lines[0]) > FALL for line in lines[1:])
    return min(max(MOST_REPLAY, start), start + REPLAY_STEP * falls) if start else 0.0


def best_of(lines: Sequence[Line], weights: Mapping[str, float]) -> int:
    """The line whose draft to propose: the fastest mix among those where old text as a whole has not fallen. Whether a
    single domain has is for the verdict to say, which has texts enough."""
    sound = [i for i, line in enumerate(lines) if line.old_mean >= lines[0].old_mean * (1 - FALL)]
    # The first line is the deployed draft's own, so there is always one.
    return max(sound, key=lambda i: (mix_pace(lines[i], weights), -i))


def has_stalled(lines: Sequence[Line], weights: Mapping[str, float], patience: int) -> bool:
    """Whether the last ``patience`` rounds brought no progress on the mix."""
    if len(lines) <= patience:
        return False
    before = max(mix_pace(line, weights) for line in lines[:-patience])
    return max(mix_pace(line, weights) for line in lines[-patience:]) < before * (1 + LEAST_PROGRESS)


@dataclass(frozen=True, slots=True)
class Weighted:
    """A captured conversation, and how many of the traffic's it stands for."""

    conversation: Conversation
    weight: float


def compose(
    captured: Sequence[Weighted], replay: Sequence[Conversation], *, share: float, tokens: int, seed: int, number: int
) -> list[Conversation]:
    """About ``tokens`` answer tokens for round ``number``, ``share`` of them replayed with each domain's part equal."""
    rng = random.Random(f"{seed}/{number}")
    share = share if replay else 0.0
    # Weighted order without replacement: Efraimidis and Spirakis 2006.
    order = sorted(captured, key=lambda one: rng.random() ** (1 / one.weight), reverse=True)
    found = _up_to([one.conversation for one in order], tokens * (1 - share))
    by_domain: dict[str, list[Conversation]] = defaultdict(list)
    for conversation in replay:
        by_domain[conversation.domain].append(conversation)
    for _, conversations in sorted(by_domain.items()):
        rng.shuffle(conversations)
        found += _up_to(conversations, tokens * share / len(by_domain))
    rng.shuffle(found)
    return found


def _up_to(order: Sequence[Conversation], tokens: float) -> list[Conversation]:
    """The first of ``order`` that hold so many answer tokens, over and over where all together hold fewer."""
    found: list[Conversation] = []
    total = 0
    while order and total < tokens:
        for conversation in order:
            if total >= tokens:
                break
            found.append(conversation)
            total += max(answer_length(conversation), 1)
    return found
