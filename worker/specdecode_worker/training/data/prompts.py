"""Training prompts: topics combined with forms of task, many thousand different questions from a few hundred words.

The words are in prompts.toml. A rollout takes most of its questions from here. The target generates the others itself
(see ``question_sources``). Held-out prompts are in benchmarks/prompts/ and written by hand; ``overlaps`` keeps training
prompts apart from them.
"""

from __future__ import annotations

import functools
import random
import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdecode_worker.training.data import passages

SELF_ASKED = "self-asked"
NGRAM_WORDS = 13


@dataclass(frozen=True, slots=True)
class Prompt:
    """Question of a domain."""

    text: str
    domain: str


def draw(rng: random.Random) -> Prompt:
    """Return a random prompt of the combinatorial set."""
    domains: dict[str, dict[str, Any]] = _lists()["domains"]
    domain = rng.choices(list(domains), [part["share"] for part in domains.values()])[0]
    form: str = rng.choice(domains[domain]["forms"])
    words = _words(rng)
    sentences = _lists()["words"]["sentence"]
    words["sentence"] = rng.choice(sentences).format_map(words)
    # Each sentence of a story draws its own words.
    words["story"] = " ".join(sentence.format_map(_words(rng)) for sentence in rng.sample(sentences, 4))
    return Prompt(form.format_map(words), domain)


@functools.cache
def _lists() -> dict[str, Any]:
    return tomllib.loads((Path(__file__).parent / "prompts.toml").read_text())


def _words(rng: random.Random) -> dict[str, str]:
    """Return a random word for every placeholder of the forms."""
    lists: dict[str, list[str]] = _lists()["words"]
    words = {name: rng.choice(lists[name]) for name in ("language", "task", "place", "mood")}
    words["topic"], words["other"] = rng.sample(lists["topic"], 2)
    words["person"], words["other_person"] = rng.sample(lists["person"], 2)
    for name, (least, most) in {"a": (20, 99), "b": (100, 999), "c": (2, 12), "d": (3, 15), "e": (4, 30)}.items():
        words[name] = str(rng.randint(least, most))
    words["percent"] = str(rng.choice([5, 10, 15, 20, 25, 30, 40, 50, 75]))
    for name in ("input", "goods", "entity", "concept"):
        words[name], words[f"{name}2"] = rng.sample(lists[name], 2)
    words["field"], words["field2"], words["field3"] = rng.sample(lists["field"], 3)
    for name in ("output", "code_language", "command", "problem"):
        words[name] = rng.choice(lists[name])
    return words | _identifiers(words) | _quoted(rng)


def _identifiers(words: dict[str, str]) -> dict[str, str]:
    """Return names of tables and columns made from the words, with underscores."""
    made = {"table": words["entity"] + "s", "column": words["field"], "column2": words["field2"]}
    return {name: word.replace(" ", "_") for name, word in made.items()}


def _quoted(rng: random.Random) -> dict[str, str]:
    """Return a random passage, symbol and code snippet of the standard library."""
    texts = {"passage": passages.passages(), "symbol": passages.symbols(), "snippet": passages.snippets()}
    return {name: rng.choice(choices) for name, choices in texts.items()}


def ngrams(text: str, size: int = NGRAM_WORDS) -> set[tuple[str, ...]]:
    """Return the runs of ``size`` words of a text, in lower case and without punctuation. A shorter text is one run."""
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[i : i + size]) for i in range(max(1, len(words) - size + 1))}


def overlaps(text: str, held_out: Iterable[set[tuple[str, ...]]]) -> bool:
    """Return whether a training prompt shares a run of words with a held-out prompt.

    A prompt shorter than a run overlaps only with the same prompt.
    """
    mine = ngrams(text)
    return any(mine & theirs for theirs in held_out)
