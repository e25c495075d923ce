"""What quantising a draft's weights costs in tokens per step: the target says its greedy text once, and the draft is
walked through it in bf16 and with int4, int8 and fp8 weights.

    .venv/bin/python benchmarks/quantised_draft.py --depth 3 --max-tokens 128 \\
        --prompts benchmarks/prompts/heldout.jsonl --out benchmarks/results/quantised-draft
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any, get_args

import torch
from machine import described

from specdecode_worker.commands.flags import add_model_flags, add_shape_flags, method_and_draft
from specdecode_worker.contract import DraftQuantization, TreeShape
from specdecode_worker.models.fetch import resolve
from specdecode_worker.models.optimize import quantise_draft
from specdecode_worker.models.weights import load_causal_lm, load_head, prepare_eagle3
from specdecode_worker.training.acceptance import StepCounts, target_token_ranks
from specdecode_worker.training.conversations import Chat
from specdecode_worker.training.prompts import greedy, read_prompts
from specdecode_worker.training.rollout import Rollout, RolloutSettings, conversation_of
from specdecode_worker.training.split_target import TargetPlacement, target_engine

_CPU = torch.device("cpu")
MOST_LOST = 0.03
"""Tokens per step that a quantised draft may cost."""


def main() -> int:
    args = _arguments()
    if args.threads:
        torch.set_num_threads(args.threads)
    _, draft = method_and_draft(args)
    dtype, folder = getattr(torch, args.dtype), resolve(args.model)
    target = load_causal_lm(folder, dtype=dtype, device=_CPU)
    lines, shape = read_prompts(Path(args.prompts)), args.shape or TreeShape.chain(3)
    questions = list(greedy(lines, Chat(folder)))
    settings = RolloutSettings(rows=min(32, len(lines)), answer_tokens=args.max_tokens, for_training=False)
    placement = TargetPlacement(folder=folder, dtype=args.dtype, device=_CPU, threads=args.threads)
    longest = max(len(question.ids or ()) for question in questions) + args.max_tokens
    texts = []
    with target_engine(placement, rows=settings.rows, longest=longest) as engine:
        for text in Rollout(engine, settings, iter(questions)).texts():
            texts.append(text)
            print(f"{len(texts)} of {len(lines)} answers", file=sys.stderr, flush=True)
    said = [conversation_of(target, text) for text in texts]
    found: dict[str, Any] = {}
    for kind in (None, *get_args(DraftQuantization)):
        head = load_head(prepare_eagle3(resolve(str(draft)), target), target, dtype=dtype, device=_CPU)
        quantise_draft(head, kind)
        counts, name = StepCounts(), kind or args.dtype
        for start in range(0, len(said), 8):
            for ranks in target_token_ranks(head, said[start : start + 8], target.lm_head.weight, max(shape.depths)):
                counts.walk(ranks, shape)
        found[name] = {"tokens_per_step": counts.tokens_per_step, "acceptance": counts.acceptance}
        print(name, found[name], flush=True)
    plain = found[args.dtype]["tokens_per_step"]
    for row in found.values():
        row["lost"] = plain - row["tokens_per_step"]
        row["met"] = row["lost"] <= MOST_LOST
    if args.out:
        document = {**described(), "model": args.model, "prompts": len(lines), "tokens": args.max_tokens, "rows": found}
        Path(args.out).with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n")
    return 0 if all(row["met"] for row in found.values()) else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", required=True, metavar="FILE.jsonl")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--out", metavar="STEM")
    add_model_flags(parser)
    add_shape_flags(parser)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
