"""Command ``eval``: measure the acceptance of a draft by domain and depth, before it is deployed.

An EAGLE-3 head is evaluated by replay of the target's greedy text on a CPU. Every other method, sampled text and a GPU
take the engine (common/engine_evaluation.py). ``--sampler`` compares samplers instead (common/sampler_comparison.py).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from specdecode_worker.commands import comparison as engine_evaluation
from specdecode_worker.commands import sampler_comparison
from specdecode_worker.commands.flags import (
    add_model_flags,
    add_output_flags,
    add_shape_flags,
    add_tensor_parallel_flag,
    method_and_draft,
)
from specdecode_worker.contract import TreeShape
from specdecode_worker.models.errors import ModelError
from specdecode_worker.models.fetch import resolve
from specdecode_worker.models.optimize import quantise_draft, quantise_target
from specdecode_worker.models.weights import load_causal_lm, load_eagle3
from specdecode_worker.training.conversations import Chat, Conversation
from specdecode_worker.training.errors import TrainingError
from specdecode_worker.training.evaluation import evaluate
from specdecode_worker.training.prompts import greedy, read_prompts
from specdecode_worker.training.rollout import Rollout, RolloutSettings

_ROWS = 32
"""Largest number of answers generated at a time."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this command to ``parser``."""
    add_model_flags(parser)
    add_shape_flags(parser)
    add_output_flags(parser)
    parser.add_argument("--max-tokens", type=int, default=256, help="length of an answer (default: %(default)s)")
    parser.add_argument(
        "--sampler", type=sampler_comparison.samplers, metavar="S,S", help="coupled,mss: compare samplers, not domains"
    )
    parser.add_argument(
        "--temperature",
        type=sampler_comparison.temperatures,
        metavar="T,T",
        help="of the answers (default: greedy; with --sampler 0.3 to 1.2)",
    )
    parser.add_argument(
        "--concurrency", type=int, metavar="N",
        help="run the engine with so many requests at once, also for an EAGLE-3 head "
        f"(default: {engine_evaluation.DEFAULT_CONCURRENCY} where the engine is needed)",
    )  # fmt: skip
    add_tensor_parallel_flag(parser)


def run(args: argparse.Namespace) -> int:
    """Return the exit code: 0 with the results on standard output, 1 on an error, 2 for wrong usage."""
    try:
        method, draft = method_and_draft(args)
        if method == "none" or not args.prompts:
            raise ValueError("eval needs a draft and --prompts FILE.jsonl")
        if args.concurrency is not None and args.concurrency < 1:
            raise ValueError(f"--concurrency is {args.concurrency}; it must be at least 1")
    except ValueError as error:
        print(f"specdecode-worker eval: {error}", file=sys.stderr)
        return 2
    try:
        document, table = _run_evaluation(args, method, draft)
    except (TrainingError, ModelError, OSError, ValueError) as error:
        print(f"specdecode-worker eval: {error}", file=sys.stderr)
        return 1
    print(json.dumps(document, indent=2) if args.json else table(document))
    return 0


def _run_evaluation(
    args: argparse.Namespace, method: str, draft: str | None
) -> tuple[dict[str, Any], Callable[[dict[str, Any]], str]]:
    """Return the results and the function that formats them."""
    if args.sampler:
        args.temperature = args.temperature or sampler_comparison.TEMPERATURES
        return sampler_comparison.compare(args), sampler_comparison.table
    on_engine = args.temperature or args.concurrency or args.device == "cuda" or args.tensor_parallel_size > 1
    if method != "eagle3" or on_engine:
        args.temperature = args.temperature or (0.0,)
        args.concurrency = args.concurrency or engine_evaluation.DEFAULT_CONCURRENCY
        return engine_evaluation.evaluate_on_engine(args), engine_evaluation.table
    return _evaluate(args, str(draft)), _table


def _evaluate(args: argparse.Namespace, draft: str) -> dict[str, Any]:
    """Generate the target's greedy answers and evaluate the draft on them."""
    if args.threads:
        torch.set_num_threads(args.threads)
    cache = Path(args.cache_dir) if args.cache_dir else None
    dtype, device = getattr(torch, args.dtype), torch.device("cpu")
    folder = resolve(args.model, cache)
    target = load_causal_lm(folder, dtype=dtype, device=device)
    head = load_eagle3(resolve(draft, cache), target, dtype=dtype, device=device)
    quantise_target(target, args.quantization, device)
    quantise_draft(head, args.draft_quantization)
    lines, chat = read_prompts(Path(args.prompts)), Chat(folder)
    settings = RolloutSettings(rows=min(_ROWS, len(lines)), answer_tokens=args.max_tokens, for_training=False)
    conversations: list[Conversation] = []
    for conversation in Rollout(target, settings, greedy(lines, chat)).conversations():
        conversations.append(conversation)
        print(f"eval: {len(conversations)} of {len(lines)} answers", file=sys.stderr, flush=True)
    return evaluate(target, head, conversations, args.shape or TreeShape.chain(3))


def _table(document: dict[str, Any]) -> str:
    """Format the results as a table with a row for each domain."""
    lines = [f"{'':10} {'tokens/step':>11} {'speedup':>8} {'distinct 4-grams':>17}  acceptance by depth | advice"]
    for name, part in {"overall": document["overall"], **document["domains"]}.items():
        acceptance = " ".join(f"{a:.2f}" for a in part["acceptance"])
        lines.append(
            f"{name:10} {part['tokens_per_step']:11.2f} {part['speedup']:8.2f} {part['distinct_4grams']:17.2f}"
            f"  {acceptance} | {part['advice']}"
        )
    return "\n".join(lines)
