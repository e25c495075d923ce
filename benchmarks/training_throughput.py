"""Throughput of training against its own parts: what the teacher, the data and the student cost a token.

    python benchmarks/training_throughput.py --recorded OUT/recorded > benchmarks/recordings/training-throughput.json

Every part runs as training runs it, on one thread (or ``--threads``), on the embedded target and its head. Seconds are
of the processor, not of the clock, so that other work on the machine does not count.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from machine import described

from specdecode_worker.commands.flags import EMBEDDED_DRAFT, EMBEDDED_TARGET
from specdecode_worker.models.fetch import resolve
from specdecode_worker.models.weights import load_causal_lm, load_head, prepare_eagle3
from specdecode_worker.training.conversations import Chat, DataSet, read_shard, shard_paths
from specdecode_worker.training.prompts import TrainingQuestions, normalisers
from specdecode_worker.training.rollout import Rollout, RolloutSettings, read_states
from specdecode_worker.training.split_target import TargetPlacement, target_engine
from specdecode_worker.training.trainer import (
    LossSettings,
    Trainer,
    TrainSettings,
    loss_of,
    root_counts,
    validation_line,
)
from specdecode_worker.training.unroll import batch_for, logits_of, unrolled

STEPS = 2


class Parts:
    """Processor seconds and tokens by name."""

    def __init__(self) -> None:
        self.found: dict[str, dict[str, float]] = {}

    @contextmanager
    def timed(self, name: str, tokens: int) -> Iterator[None]:
        started = time.process_time()
        yield
        part = self.found.setdefault(name, {"seconds": 0.0, "tokens": 0})
        part["seconds"] += time.process_time() - started
        part["tokens"] += tokens

    def document(self) -> dict[str, Any]:
        return {
            name: {
                "microseconds_per_token": round(1e6 * part["seconds"] / part["tokens"], 1),
                "tokens_per_second": round(part["tokens"] / part["seconds"]),
            }
            for name, part in self.found.items()
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recorded", type=Path, required=True, help="a folder of shards")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--depth", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    folder, cpu, parts = resolve(EMBEDDED_TARGET, None), torch.device("cpu"), Parts()
    target = load_causal_lm(folder, dtype=torch.bfloat16, device=cpu)
    head = load_head(prepare_eagle3(resolve(EMBEDDED_DRAFT, None), target), target, dtype=torch.float32, device=cpu)
    path = shard_paths(args.recorded)[0]
    size = sum(len(c.tokens_N) for c in read_shard(path))
    with parts.timed("data: reading a shard", size):
        conversations = list(read_shard(path))
    placement = TargetPlacement(folder=folder, dtype="bfloat16", device=cpu, threads=args.threads)
    _teacher(placement, target, conversations[:8], parts)
    data = DataSet(args.recorded, validation=8)
    data.grow(1)
    settings = TrainSettings(steps=10**6, depth=args.depth, deepen_at=(), divergence_until=0.0, acceptance_from=1e-9)
    _student(Trainer(head, target.lm_head.weight, data, settings), parts)
    document = {
        "kind": "training-throughput",
        "command": "python benchmarks/training_throughput.py",
        **described(),
        "threads": args.threads,
        "depth": args.depth,
        "parts": parts.document(),
    }
    print(json.dumps(document, indent=1))


def _teacher(placement: TargetPlacement, target: Any, conversations: list[Any], parts: Parts) -> None:
    chat, name = Chat(placement.folder), "teacher: generating a token, its question's included (96 answers together)"
    questions = TrainingQuestions(chat, (), seed=0)
    settings = RolloutSettings(rows=96, answer_tokens=64)
    with target_engine(placement, rows=96, longest=settings.question_tokens + 64) as engine:
        rollout = Rollout(
            engine, settings, islice(questions, 96), around=chat.around_question(), is_refused=questions.is_refused
        )
        with parts.timed(name, 0):
            parts.found[name] = {"seconds": 0.0, "tokens": sum(len(text.tokens) for text in rollout.texts())}
    for conversation in conversations:
        with parts.timed("teacher: reading a token (one pass over a text)", len(conversation.tokens_N)):
            read_states(target, conversation.tokens_N.long())
        with parts.timed("teacher: normalisers at four temperatures", len(conversation.tokens_N)):
            normalisers(conversation.hidden_NE, target.lm_head.weight, 0)


def _student(run: Trainer, parts: Parts) -> None:
    run.step(next(groups := run._batches()))
    for group in islice(groups, STEPS):
        texts = group[0]
        tokens = root_counts(texts, 1)[0]
        with parts.timed("student: a whole step", tokens):
            run.step(group)
        with parts.timed("data: padding a batch", tokens):
            batch = batch_for(run.head, texts, run.output_VE.dtype)
        with parts.timed("student: layer, forward", tokens), torch.no_grad():
            states = [state for state, _ in unrolled(run.head, batch, run.depth)]
        with parts.timed("student: logits, forward", tokens), torch.no_grad():
            valid_R = batch.valid_BA.flatten()
            for k, state in enumerate(states):
                logits_of(run.head, state.flatten(0, 1)[valid_R], k)
        for name, divergence in (("divergence", 1.0), ("acceptance", 0.0)):
            aim = replace(LossSettings(depth=run.depth, decay=0.8), divergence=divergence)
            with parts.timed(f"student: {name} loss with target's logits, forward and backward", tokens):
                loss_of(run.head, batch, run.output_VE, aim).backward()  # type: ignore[no-untyped-call]
    tokens = root_counts(run.data.validation, 1)[0]
    with parts.timed("validation", tokens):
        validation_line(run.head, run.data.validation, run.output_VE)


if __name__ == "__main__":
    sys.exit(main())
