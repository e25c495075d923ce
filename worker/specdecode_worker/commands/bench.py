"""Command ``bench``: compare speculation with plain decoding on the same prompts, interleaved in one run."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from specdecode_kernels.cpu.native import cpu_flags, cpu_name
from specdecode_worker.commands.comparison import compare, comparison_table
from specdecode_worker.commands.local_engine import DEFAULT_SHAPE, LocalEngine, TokenizedPrompt, local_engine
from specdecode_worker.contract import TreeShape, adapted_uri
from specdecode_worker.embedded.errors import EmbeddedModelError
from specdecode_worker.models.errors import ModelError
from specdecode_worker.training.errors import TrainingError

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
"""Prompts used if no file of prompts is given."""
MIN_PROMPTS = 4
"""Fewest prompts for each concurrency, because the acceptance of a single text is not representative."""


def run(args: argparse.Namespace) -> int:
    """Return the exit code: 0 on success, 1 on an error."""
    try:
        engine = local_engine(args, max_num_seqs=max(args.concurrency))
        prompts = _prompts(engine, args)
        shape = args.shape if args.shape is not None else DEFAULT_SHAPE
        results = {count: compare(engine, prompts, count, shape, args) for count in args.concurrency}
        document = _document(args, engine, shape, results)
    except (ModelError, EmbeddedModelError, TrainingError, ValueError, OSError) as error:
        print(f"specdecode-worker bench: {error}", file=sys.stderr)
        return 1
    print(json.dumps(document, indent=2) if args.json else comparison_table(document))
    return 0


def _prompts(engine: LocalEngine, args: argparse.Namespace) -> list[TokenizedPrompt]:
    """Return the prompts of the file, or built-in questions, repeated to fill the highest concurrency.

    Raises:
        PromptFileError: The file cannot be used.
    """
    if args.prompts:
        results = engine.prompts(Path(args.prompts))
    else:
        results = [engine.prompt({"messages": [{"role": "user", "content": text}]}) for text in QUESTIONS]
    wanted: int = max(*args.concurrency, len(results) if args.prompts else MIN_PROMPTS)
    return (results * -(-wanted // len(results)))[:wanted]


def _document(
    args: argparse.Namespace, engine: LocalEngine, shape: TreeShape, by_concurrency: dict[int, dict[str, Any]]
) -> dict[str, Any]:
    """Build the JSON document of the results."""
    return {
        "model": adapted_uri(args.model, args.adapter),
        "draft": engine.engine.draft.hash,
        "shape": str(shape),
        "dtype": args.dtype,
        "temperature": args.temperature,
        "max_tokens": args.max_tokens,
        "threads": torch.get_num_threads(),
        "instruction_set": _instruction_set(),
        "machine": f"{len(os.sched_getaffinity(0))} cores of {cpu_name()}",
        "date": datetime.date.today().isoformat(),
        "concurrency": by_concurrency,
    }


def _instruction_set() -> str:
    """Return the best instruction set of this CPU for bf16 matrix products."""
    flags = cpu_flags()
    for name in ("amx_bf16", "avx512_bf16", "avx512f", "avx2"):
        if name in flags:
            return name
    return torch.backends.cpu.get_cpu_capability()
