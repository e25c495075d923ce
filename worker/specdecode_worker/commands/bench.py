"""``specdecode-worker bench``: speculation against plain decoding, interleaved in one run, on the same prompts."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from specdecode_worker.commands.flags import add_model_flags, add_output_flags, add_sampling_flags, add_shape_flags
from specdecode_worker.commands.local import (
    DEFAULT_SHAPE,
    Answer,
    LocalEngine,
    Pace,
    Prompt,
    distinct_4grams,
    local_engine,
    sampling_of,
)
from specdecode_worker.commands.peer import is_installed, transformers_tokens_per_second
from specdecode_worker.contract import TreeShape
from specdecode_worker.embedded.errors import EmbeddedModelError
from specdecode_worker.models.errors import ModelError
from specdecode_worker.server.errors import TokenizerProblem

PLAIN = TreeShape(())
QUESTIONS = (
    "Write a Python function that returns the n-th Fibonacci number, and explain how it works.",
    "What is photosynthesis, and why does it matter?",
    "Tell me a short story about a lighthouse keeper who finds a letter.",
    "How do vaccines work?",
    "Write an SQL query that lists the ten customers with the most orders.",
    "Describe a walk through an old town in autumn.",
    "What is the difference between a list and a tuple in Python?",
    "Give me a recipe for a simple vegetable soup.",
)
"""Run when no file of prompts is named."""
FEWEST = 4
"""Prompts of every level: acceptance of a single text says little."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--against", choices=("plain",), default="plain", help="what to compare with")
    parser.add_argument("--concurrency", type=_counts, default=(1,), metavar="1,2,4", help="prompts run together")
    parser.add_argument("--rounds", type=int, default=1, help="times that plain, spec, spec, plain is run")
    parser.add_argument(
        "--transformers",
        action=argparse.BooleanOptionalAction,
        default=is_installed(),
        help="also transformers' own generate, one prompt at a time (default: where it is installed)",
    )
    add_model_flags(parser)
    add_shape_flags(parser)
    add_sampling_flags(parser, max_tokens=128)
    add_output_flags(parser)


def run(args: argparse.Namespace) -> int:
    try:
        engine = local_engine(args, max_num_seqs=max(args.concurrency))
        shape = args.shape if args.shape is not None else DEFAULT_SHAPE
        prompts = _prompts(engine, args)
        found = [_compare(engine, prompts, n, shape, args) for n in args.concurrency]
        document = _document(args, engine, shape, dict(zip(args.concurrency, found, strict=True)))
        if args.transformers:
            pace = transformers_tokens_per_second(
                engine.folder, args.dtype, [p.tokens for p in prompts], args.max_tokens
            )
            document["transformers"] = {"tokens_per_second": pace}
    except (ModelError, EmbeddedModelError, TokenizerProblem, ValueError, OSError) as error:
        print(f"specdecode-worker bench: {error}", file=sys.stderr)
        return 1
    print(json.dumps(document, indent=2) if args.json else _table(document))
    return 0


@dataclass(slots=True)
class Side:
    """Sums over the runs of one side."""

    seconds: float = 0.0
    tokens: int = 0
    steps: int = 0

    def add(self, pace: Pace) -> None:
        self.seconds += pace.seconds
        self.tokens += pace.tokens
        self.steps += pace.steps

    @property
    def pace(self) -> Pace:
        return Pace(self.seconds, self.tokens, self.steps)


def _prompts(engine: LocalEngine, args: argparse.Namespace) -> list[Prompt]:
    """All of a file, or a few questions; repeated where the highest concurrency is higher."""
    if args.prompts:
        found = engine.prompts(Path(args.prompts))
    else:
        found = [engine.prompt({"messages": [{"role": "user", "content": text}]}) for text in QUESTIONS]
    if not found:
        raise ValueError(f"{args.prompts} holds no prompt")
    wanted: int = max(*args.concurrency, len(found) if args.prompts else FEWEST)
    return (found * -(-wanted // len(found)))[:wanted]


def _compare(
    engine: LocalEngine, prompts: Sequence[Prompt], together: int, shape: TreeShape, args: argparse.Namespace
) -> dict[str, Any]:
    """Plain, speculative, speculative, plain: what drifts meanwhile falls on both."""
    plain, speculative = Side(), Side()
    texts: dict[bool, list[Answer]] = {}
    _warm(engine, prompts[:together], shape, args)
    for is_plain in (True, False, False, True) * args.rounds:
        engine.run_shape(PLAIN if is_plain else shape)
        side = Side()
        texts[is_plain] = _waves(engine, prompts, together, args, side)
        (plain if is_plain else speculative).add(side.pace)
        print(
            f"  {together} at once, {'plain' if is_plain else shape}: {side.pace.tokens_per_second:.1f} tokens/s",
            file=sys.stderr,
        )
    return _comparison(plain.pace, speculative.pace, texts)


def _waves(
    engine: LocalEngine, prompts: Sequence[Prompt], together: int, args: argparse.Namespace, side: Side
) -> list[Answer]:
    """Answers to all prompts, ``together`` at a time; an incomplete last wave is left out."""
    answers: list[Answer] = []
    for start in range(0, len(prompts) - together + 1, together):
        wave = range(start, start + together)
        new, pace = engine.answer([prompts[i] for i in wave], [sampling_of(args, i) for i in wave])
        answers += new
        side.add(pace)
    return answers


def _warm(engine: LocalEngine, prompts: Sequence[Prompt], shape: TreeShape, args: argparse.Namespace) -> None:
    for each in (PLAIN, shape):
        engine.run_shape(each)
        short = argparse.Namespace(**{**vars(args), "max_tokens": min(args.max_tokens, 8)})
        engine.answer(prompts, [sampling_of(short, index) for index in range(len(prompts))])


def _comparison(plain: Pace, speculative: Pace, texts: dict[bool, list[Answer]]) -> dict[str, Any]:
    drafted = texts[False]
    drafts = sum(answer.drafts for answer in drafted)
    same = sum(a.tokens == b.tokens for a, b in zip(texts[True], drafted, strict=True))
    return {
        "plain": _pace(plain),
        "speculative": _pace(speculative),
        "ratio": speculative.tokens_per_second / plain.tokens_per_second,
        "tokens_per_step": 1 + sum(answer.accepted for answer in drafted) / drafts if drafts else 1.0,
        "distinct_4grams": distinct_4grams([answer.tokens for answer in drafted]),
        "identical": same == len(drafted),
        "identical_answers": f"{same}/{len(drafted)}",
    }


def _pace(pace: Pace) -> dict[str, float]:
    return {"tokens_per_second": pace.tokens_per_second, "step_milliseconds": pace.step_milliseconds}


def _document(
    args: argparse.Namespace, engine: LocalEngine, shape: TreeShape, by_concurrency: dict[int, dict[str, Any]]
) -> dict[str, Any]:
    return {
        "model": args.model,
        "draft": engine.engine.draft.hash,
        "shape": str(shape),
        "dtype": args.dtype,
        "temperature": args.temperature,
        "max_tokens": args.max_tokens,
        "threads": torch.get_num_threads(),
        "instruction_set": _instruction_set(),
        "concurrency": by_concurrency,
    }


def _instruction_set() -> str:
    """What makes bf16 matrices fast on this CPU, if anything does."""
    flags = set()
    cpu = Path("/proc/cpuinfo")
    if cpu.exists():
        line = next((line for line in cpu.read_text().splitlines() if line.startswith("flags")), "")
        flags = set(line.split())
    for name in ("amx_bf16", "avx512_bf16", "avx512f", "avx2"):
        if name in flags:
            return name
    return torch.backends.cpu.get_cpu_capability()


def _table(document: dict[str, Any]) -> str:
    lines = [
        f"{document['shape']} on {document['model']}, {document['dtype']}, {document['instruction_set']}, "
        f"{document['threads']} threads",
        "  at once   plain tok/s   spec tok/s   ratio   tok/step   plain ms   spec ms   4-grams   identical",
    ]
    for count, row in document["concurrency"].items():
        plain, speculative = row["plain"], row["speculative"]
        lines.append(
            f"  {count:7}   {plain['tokens_per_second']:11.1f}   {speculative['tokens_per_second']:10.1f}   "
            f"{row['ratio']:5.2f}   {row['tokens_per_step']:8.2f}   {plain['step_milliseconds']:8.1f}   "
            f"{speculative['step_milliseconds']:7.1f}   {row['distinct_4grams']:7.2f}   {row['identical_answers']:>9}"
        )
    if "transformers" in document:
        lines.append(f"  transformers, one at a time: {document['transformers']['tokens_per_second']:.1f} tokens/s")
    return "\n".join(lines)


def _counts(text: str) -> tuple[int, ...]:
    try:
        counts = tuple(int(part) for part in text.split(","))
    except ValueError:
        counts = (0,)
    if min(counts) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} should be counts like 1,2,4")
    return counts
