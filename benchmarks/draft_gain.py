"""Gain of one draft over another at several numbers of requests at once, in the real engine.

    python benchmarks/draft_gain.py --before URI --after URI --prompts FILE.jsonl > results.json

Both drafts answer the same prompts in turns, in random order, with the same seeds, so they emit the same text. The time
is that of the processor after all prompts have their first token. The gain of a round is the first draft's time per
token over the second's, less one; bounds are those of Student's t over the logarithms of the rounds.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from machine import described
from scipy.stats import t as student_t

from specdecode_worker.commands.flags import EMBEDDED_DRAFT, EMBEDDED_TARGET
from specdecode_worker.commands.local_engine import Answer, LocalEngine, TokenizedPrompt
from specdecode_worker.contract import DraftConfig, EngineConfig, ModelConfig, NamedDraft, TreeShape, WorkerConfig
from specdecode_worker.core.messages import Tokens
from specdecode_worker.models.fetch import default_cache_dir
from specdecode_worker.sampling.params import Sampling

SHAPE = TreeShape.chain(3)
BEFORE, AFTER = "", "after"
FEW = 4
"""Number of requests below which there are more rounds, because each of them has few tokens."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", default=EMBEDDED_DRAFT, metavar="URI")
    parser.add_argument("--after", required=True, metavar="URI")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--concurrency", default="1,8,32")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--max-tokens", type=int, default=32)
    args = parser.parse_args()
    torch.set_num_threads(1)
    sizes = [int(size) for size in args.concurrency.split(",")]
    engine = both_drafts(args.before, args.after, max(sizes))
    found = gains(engine, engine.prompts(args.prompts), sizes, args.rounds, args.max_tokens)
    print(json.dumps({**described(), "shape": "chain:3", "rounds": args.rounds, "by_concurrency": found}, indent=1))


def both_drafts(before: str, after: str, requests: int) -> LocalEngine:
    """Return an engine of the embedded target that has both drafts."""
    config = WorkerConfig(
        model=ModelConfig(uri=EMBEDDED_TARGET, served_name="m"),
        draft=DraftConfig(uri=before, required=True),
        drafts=(NamedDraft(name=AFTER, uri=after),),
        engine=EngineConfig(max_num_seqs=requests, threads=1, kv_cache_tokens=requests * 256),
    )
    return LocalEngine(config, default_cache_dir())


def gains(
    engine: LocalEngine, prompts: Sequence[TokenizedPrompt], sizes: Sequence[int], rounds: int, max_tokens: int
) -> dict[str, Any]:
    """Return the gain for each number of requests at once."""
    generator = random.Random(0)
    found = {}
    for size in sizes:
        source = itertools.cycle(prompts)
        count = rounds * max(1, FEW // size)
        results = [_round(engine, list(itertools.islice(source, size)), max_tokens, generator) for _ in range(count)]
        found[str(size)] = _summary(results)
        print(f"draft_gain: {size} at once: {found[str(size)]}", file=sys.stderr, flush=True)
    return found


def _round(
    engine: LocalEngine, prompts: Sequence[TokenizedPrompt], max_tokens: int, generator: random.Random
) -> dict[str, dict[str, Any]]:
    """Answer the prompts with both drafts in random order."""
    order = [BEFORE, AFTER]
    generator.shuffle(order)
    return {draft: _run(engine, prompts, draft, max_tokens) for draft in order}


def _run(engine: LocalEngine, prompts: Sequence[TokenizedPrompt], draft: str, max_tokens: int) -> dict[str, Any]:
    """Return processor seconds, tokens and texts of one draft, from the moment when all prompts have a token."""
    sampling = [Sampling(max_tokens=max_tokens, temperature=0.0, seed=i, ignore_eos=True) for i in range(len(prompts))]
    started: set[int] = set()
    began: list[float] = []
    counts = {"tokens": 0, "steps": 0}

    def take(index: int, new: Tokens) -> None:
        if began:
            counts["tokens"] += len(new.tokens)
            counts["steps"] += 1
        started.add(index)
        if len(started) == len(prompts) and not began:
            began.append(time.process_time())

    engine.run_shape(SHAPE, draft)
    answers, _ = engine.answer(prompts, sampling, take, isolated=True)
    return {"seconds": time.process_time() - began[0], "texts": _texts(answers), **counts}


def _texts(answers: Sequence[Answer]) -> list[list[int]]:
    return [answer.tokens for answer in answers]


def _summary(rounds: Sequence[dict[str, dict[str, Any]]]) -> dict[str, Any]:
    """Return gain, bounds and tokens per step over the rounds."""
    logs = [math.log(_time_per_token(one[BEFORE]) / _time_per_token(one[AFTER])) for one in rounds]
    mean = sum(logs) / len(logs)
    deviation = math.sqrt(sum((x - mean) ** 2 for x in logs) / (len(logs) - 1))
    reach = float(student_t.ppf(0.975, len(logs) - 1)) * deviation / math.sqrt(len(logs))
    same = [before == after for one in rounds for before, after in _pairs(one)]
    return {
        "rounds": len(rounds),
        "gain": round(math.expm1(mean), 4),
        "bounds": [round(math.expm1(mean - reach), 4), round(math.expm1(mean + reach), 4)],
        "tokens_per_step": {
            name: round(sum(one[draft]["tokens"] for one in rounds) / sum(one[draft]["steps"] for one in rounds), 3)
            for name, draft in (("before", BEFORE), ("after", AFTER))
        },
        "same_texts": f"{sum(same)}/{len(same)}",
    }


def _pairs(one: dict[str, dict[str, Any]]) -> Iterator[tuple[list[int], list[int]]]:
    return zip(one[BEFORE]["texts"], one[AFTER]["texts"], strict=True)


def _time_per_token(run: dict[str, Any]) -> float:
    seconds: float = run["seconds"]
    return seconds / run["tokens"]


if __name__ == "__main__":
    main()
