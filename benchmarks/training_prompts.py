"""Prompts for training a draft, as wide as a dictionary: WordNet's common words in forms that fit what they are.

Prompts made of a few hundred words teach a draft their own kind and little else (docs/how-to/train-a-draft.md). Here
every question has words of its own; passages to summarize are answers that the target gave before. WordNet is
Debian's wordnet-base; its licence lets anybody use it, and is named in the head's card.

    apt-get download wordnet-base && dpkg-deb -x wordnet-base_*.deb words
    .venv/bin/python benchmarks/training_prompts.py --wordnet words/usr/share/wordnet \
        --recorded OUT/recorded --count 8000 --out prompts.jsonl
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from specdecode_worker.models.fetch import default_cache_dir, resolve
from specdecode_worker.server.tools import Tokenizer
from specdecode_worker.training import prompts
from specdecode_worker.training.conversations import read_shard

NOUNS = {
    4: "act", 5: "animal", 6: "artifact", 8: "body", 9: "cognition", 10: "communication", 11: "event", 12: "feeling",
    13: "food", 14: "group", 15: "location", 18: "person", 19: "phenomenon", 20: "plant", 26: "state", 27: "substance",
}  # fmt: skip
"""WordNet's lexicographer files of nouns by number (lexnames(5WN)), those that there are forms for."""
SHARES = {"qa": 0.5, "prose": 0.14, "summary": 0.13, "rewrite": 0.05, "built-in": 0.18}
PASSAGE_WORDS = range(30, 110)


@dataclass(slots=True)
class Words:
    """By lexicographer file: words, and names; what verbs mean; example sentences."""

    common: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    names: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    does: list[str] = field(default_factory=list)
    sayings: list[str] = field(default_factory=list)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wordnet", type=Path, required=True, metavar="DIR", help="with data.noun and data.verb")
    parser.add_argument("--recorded", type=Path, required=True, metavar="DIR", help="of a training run before")
    parser.add_argument("--count", type=int, default=8000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.jsonl")
    args = parser.parse_args()
    rng = random.Random(args.seed)
    forms = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
    words = read_words(args.wordnet)
    passages = list(read_passages(args.recorded))
    if not passages:
        raise SystemExit(f"error: no answer in {args.recorded} has sentences of 30 to 109 words; record longer answers")
    seen: set[str] = set()
    with args.out.open("w") as lines:
        while len(seen) < args.count:
            text, domain = made_up(rng, forms, words, passages)
            if text not in seen:
                seen.add(text)
                line = {"messages": [{"role": "user", "content": text}], "domain": domain}
                lines.write(json.dumps(line, ensure_ascii=False) + "\n")
    different = {word for kind in words.common.values() for word in kind}
    print(f"{len(seen)} prompts from {len(different)} words and {len(passages)} passages")


def read_words(folder: Path) -> Words:
    """Nouns in their first sense, as often in the lists as they should be drawn: by the root of how often WordNet's
    tagged texts say them. Words that these never say are known to hardly anybody, and to no small model."""
    words = Words()
    for line in (folder / "cntlist.rev").read_text().splitlines():
        key, sense, count = line.split()
        lemma, place = key.split("%")
        kind, file = map(int, place.split(":")[:2])
        if (kind, sense) == (1, "1") and file in NOUNS and len(lemma) > 2 and not lemma[0].isdigit():
            words.common[NOUNS[file]] += [lemma.replace("_", " ")] * math.ceil(math.sqrt(int(count)))
    for line in _entries(folder / "data.noun"):
        fields, gloss = line.split(" | ", 1)
        _, number, _, _, lemma, *_ = fields.split()
        if lemma[0].isupper() and " @i " in fields and int(number) in (15, 18):
            words.names[NOUNS[int(number)]].append(lemma.replace("_", " "))
        words.sayings += _sayings(gloss)
    for line in _entries(folder / "data.verb"):
        gloss = line.split(" | ", 1)[1]
        words.sayings += _sayings(gloss)
        meaning = gloss.split(";")[0].strip()
        if 2 < len(meaning.split()) < 9 and "(" not in meaning:
            words.does.append(meaning)
    return words


def _entries(path: Path) -> Iterator[str]:
    """The licence at the top is indented."""
    return (line for line in path.read_text().splitlines() if line and line[0].isdigit())


def _sayings(gloss: str) -> list[str]:
    return [saying for saying in re.findall(r'"([^"]+)"', gloss) if len(saying.split()) > 4]


def read_passages(recorded: Path) -> Iterator[str]:
    """The beginnings of recorded answers, whole sentences of them."""
    model = resolve("embedded://smollm2-135m-instruct", default_cache_dir())
    tokenizer = Tokenizer.from_folder(model)
    for path in sorted(recorded.glob("shard-*.safetensors")):
        for conversation in read_shard(path):
            if conversation.domain not in ("qa", "prose", "self-asked", "technical"):
                continue
            text = tokenizer.decode(conversation.tokens_N[conversation.answer_start :][:140].tolist())
            first = " ".join(text.split("\n\n")[0].split())
            whole = first[: first.rfind(".") + 1]
            if len(whole.split()) in PASSAGE_WORDS and "```" not in whole:
                yield whole


def made_up(
    rng: random.Random, forms: dict[str, dict[str, list[str]]], words: Words, passages: list[str]
) -> tuple[str, str]:
    """(text, domain) of one prompt."""
    domain = rng.choices(list(SHARES), list(SHARES.values()))[0]
    if domain == "built-in":
        drawn = prompts.draw(rng)
        return drawn.text, drawn.domain
    kinds = list(forms[domain])
    # A file with many words has many questions; none of them shall be all there is.
    weights = [math.sqrt(max(len(words.common.get(kind, ())), 800)) for kind in kinds]
    kind = rng.choices(kinds, weights)[0]
    filled = rng.choice(forms[domain][kind]).format_map(_fillings(rng, kind, words, passages))
    return re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", filled[0].upper() + filled[1:]), domain


def _fillings(rng: random.Random, kind: str, words: Words, passages: list[str]) -> dict[str, str]:
    found = {name: rng.choice(common) for name, common in words.common.items()}
    found |= {f"{name}2": rng.choice(common) for name, common in words.common.items()}
    own = words.common.get(kind) or words.common[rng.choice(["artifact", "cognition", "act", "state", "communication"])]
    found["a"], found["b"] = rng.choice(own), rng.choice(own)
    found["A"] = rng.choice(words.names["person" if kind == "names" else "location"])
    return found | {"does": rng.choice(words.does), "saying": rng.choice(words.sayings), "text": rng.choice(passages)}


if __name__ == "__main__":
    main()
