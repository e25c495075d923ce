"""Different prompts of one kind, spread over the splits of a distillation, and clients that ask them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from specdecode_worker.capture import opening_hash
from specdecode_worker.training import prompts
from specdecode_worker.training.distillation.records import split_of
from support.e2e.endpoint import MODEL
from support.e2e.traffic import Traffic

_LONGEST = 300
_THINGS = (
    *("fruits", "cities", "planets", "tools", "animals", "languages", "metals", "rivers", "sports", "trees"),
    *("instruments", "spices", "dances", "birds", "vegetables", "oceans", "mountains", "games", "cheeses", "flowers"),
)
_COLUMNS = ("colour", "price", "size", "country", "weight", "age", "use", "season", "origin", "rank", "speed", "taste")


def different_questions(splits: Mapping[str, int]) -> list[str]:
    """Return questions of the training prompts, as many of each split as ``splits`` says, in random order."""
    return _spread(splits, lambda rng: prompts.draw(rng).text, "questions")


def different_tables(splits: Mapping[str, int], seed: str = "tables") -> list[str]:
    """Return requests for Markdown tables, likewise."""
    return _spread(splits, _table, seed)


def _table(rng: random.Random) -> str:
    first, second = rng.sample(_COLUMNS, 2)
    things = f"{rng.randint(4, 9)} {rng.choice(_THINGS)}"
    return f"Write a Markdown table of {things} with the columns name, {first} and {second}. Write only the table."


def _spread(splits: Mapping[str, int], draw: Callable[[random.Random], str], seed: str) -> list[str]:
    rng, left, chosen = random.Random(seed), Counter(splits), set[str]()
    while left.total() > 0:
        text = draw(rng)
        split = split_of(opening_hash(text))
        if text not in chosen and left[split] > 0 and len(text) < _LONGEST:
            left[split] -= 1
            chosen.add(text)
    texts = sorted(chosen)
    rng.shuffle(texts)
    return texts


def askers(url: str, clients: int, questions: Sequence[str]) -> Traffic:
    """Return clients that ask different questions with short answers and permit the capture of them.

    They repeat the questions, with other answers, when all were asked.
    """
    permission = {"X-Specdecode-Capture": "on"}
    return Traffic(
        url,
        MODEL,
        concurrency=clients,
        max_tokens=24,
        prompts=questions,
        timeout_s=120,
        temperature=0.8,
        headers=permission,
    )
