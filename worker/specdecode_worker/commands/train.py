"""Command ``train``: train a draft on the target's own answers or on a text.

The work is done by ``training.recipe``.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch

from specdecode_worker.commands.flags import (
    EMBEDDED_TARGET,
    add_adapter_flag,
    add_device_flag,
    add_tensor_parallel_flag,
    print_progress,
)
from specdecode_worker.contract import adapted_uri
from specdecode_worker.engine.factory import device_of
from specdecode_worker.models.causal_lm import CausalLM
from specdecode_worker.models.drafts import WeightMethod, load_draft
from specdecode_worker.models.errors import ModelError, VocabularyMismatch
from specdecode_worker.models.fetch import resolve
from specdecode_worker.models.weights import load_causal_lm
from specdecode_worker.training.artifacts import FAMILIES
from specdecode_worker.training.conversations import Chat
from specdecode_worker.training.errors import TrainingError
from specdecode_worker.training.prompts import read_prompts
from specdecode_worker.training.recipe import DraftSettings, RecordingSettings, record_answers, train_draft
from specdecode_worker.training.split_target import TargetPlacement, placed_target
from specdecode_worker.training.trainer import TrainSettings, join

_DEFAULTS = TrainSettings()
_METHODS: tuple[WeightMethod, ...] = ("eagle3", "peagle", "dflash", "eagle", "medusa", "draft-model")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this command to ``parser``."""
    parser.add_argument("--model", default=EMBEDDED_TARGET, metavar="URI", help="target (default: %(default)s)")
    add_adapter_flag(parser)
    parser.add_argument("--draft", metavar="URI", help="go on from this one (default: start from the target's layers)")
    parser.add_argument("--method", choices=_METHODS, default="eagle3", help="kind of draft (default: %(default)s)")
    parser.add_argument(
        "--layers",
        type=int,
        default=1,
        help="dense layers; one that --draft lacks is put behind its own (default: %(default)s)",
    )
    parser.add_argument(
        "--copiers",
        type=int,
        default=0,
        metavar="N",
        help="groups of attention heads to add to an EAGLE-3 layer that begin by finding where the last 1 to N tokens "
        "stood before (default: none)",
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="everything goes there; OUT/head at last"
    )
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--prompts", type=Path, metavar="FILE.jsonl", help="what to ask (default: built-in questions)")
    source.add_argument("--text", type=Path, metavar="FILE", help="train on this text instead of the target's own")
    parser.add_argument("--held-out", type=Path, metavar="FILE.jsonl", help="prompts that training must not see")
    parser.add_argument("--tokens", type=int, default=400_000, help="answer tokens to record (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=320, help="length of an answer (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=96, help="answers at a time (default: %(default)s)")
    parser.add_argument("--draft-vocab", type=int, default=8192, help="tokens that the draft knows (default: 8192)")
    parser.add_argument(
        "--no-normalisers", action="store_true", help="take probabilities over the draft's vocabulary alone: cheaper"
    )
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--steps", type=int, default=0, help="optimizer steps")
    length.add_argument("--minutes", type=float, default=65.0, help="or time (default: %(default)s)")
    parser.add_argument("--learning-rate", type=float, default=_DEFAULTS.learning_rate)
    parser.add_argument("--batch-tokens", type=int, default=_DEFAULTS.batch_tokens, help="of one pass, with padding")
    parser.add_argument("--accumulate", type=int, default=_DEFAULTS.accumulate, help="passes of an optimizer step")
    parser.add_argument("--depth", type=int, default=_DEFAULTS.depth, help="how deep to unroll (default: %(default)s)")
    parser.add_argument(
        "--patience", type=int, default=_DEFAULTS.patience, help="stop after so many validations without a better one"
    )
    parser.add_argument("--names", choices=FAMILIES, default="safeailab", help="of an EAGLE-3 head's tensors")
    parser.add_argument(
        "--validate-every", type=float, default=_DEFAULTS.validate_every, help="seconds between checkpoints"
    )
    parser.add_argument("--validate-steps", type=int, default=0, metavar="N", help="or every N steps, by no clock")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    add_device_flag(parser)
    add_tensor_parallel_flag(parser)
    parser.add_argument("--threads", type=int, help="torch threads (default: all)")
    parser.add_argument("--cache-dir", type=Path, metavar="DIR", help="where models are kept")


def run(args: argparse.Namespace) -> int:
    """Return the exit code: 0 if the draft was trained, 1 on an error."""
    if args.threads:
        torch.set_num_threads(args.threads)
    try:
        folder = _train(args)
    except (TrainingError, ModelError) as error:
        print(f"specdecode-worker train: {error}", file=sys.stderr)
        return 1
    print(folder)
    return 0


def _train(args: argparse.Namespace) -> Path:
    """Train the draft and return its folder."""
    folder = resolve(adapted_uri(args.model, args.adapter), args.cache_dir)
    placement = TargetPlacement(
        folder=folder,
        dtype=args.dtype,
        device=device_of(args.device),
        size=args.tensor_parallel_size,
        threads=args.threads,
    )
    if placement.size > 1 and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise TrainingError("--tensor-parallel-size starts its own processes; leave torchrun or the flag out")
    peers = join()
    if peers.rank == 0:
        record_answers(placement, Chat(folder), _recording_settings(args), args.seed, args.out, print_progress)
    with placed_target(placement) as target:
        return train_draft(
            target,
            _settings(args),
            _draft_settings(args, target, folder),
            args.out,
            print_progress if peers.rank == 0 else _discard,
            peers,
            whole=_whole_target(args, placement),
        )


def _whole_target(args: argparse.Namespace, placement: TargetPlacement) -> CausalLM | None:
    """Return the target in host memory if a new draft has to start from layers that the devices share."""
    if placement.size == 1 or args.draft:
        return None
    return load_causal_lm(placement.folder, dtype=getattr(torch, args.dtype), device=torch.device("cpu"))


def _draft_settings(args: argparse.Namespace, target: CausalLM, folder: Path) -> DraftSettings:
    """Build the description of the draft to train, with the draft that it continues from."""
    origin = parent = None
    if args.draft:
        parent = (args.draft, resolve(args.draft, args.cache_dir))
        cpu = torch.device("cpu")
        origin = load_draft(args.method, parent[1], target, target_folder=folder, dtype=torch.float32, device=cpu)
        if isinstance(origin, CausalLM) and origin.vocabulary is not None:
            raise VocabularyMismatch(f"{args.draft}: a draft model with another tokenizer cannot be trained further")
    return DraftSettings(
        target=(adapted_uri(args.model, args.adapter), folder),
        method=args.method,
        draft_vocab=args.draft_vocab,
        layers=args.layers,
        copiers=args.copiers,
        origin=origin,
        parent=parent,
        normalise=not args.no_normalisers,
        names=args.names,
    )


def _settings(args: argparse.Namespace) -> TrainSettings:
    """Build the optimizer settings from the flags."""
    return TrainSettings(
        steps=args.steps,
        minutes=0.0 if args.steps else args.minutes,
        learning_rate=args.learning_rate,
        batch_tokens=args.batch_tokens,
        accumulate=args.accumulate,
        depth=args.depth,
        patience=args.patience,
        seed=args.seed,
        validate_every=args.validate_every,
        validate_steps=args.validate_steps,
    )


def _recording_settings(args: argparse.Namespace) -> RecordingSettings:
    """Build the description of the training data from the flags."""
    return RecordingSettings(
        tokens=args.tokens,
        text=args.text,
        prompts=tuple(read_prompts(args.prompts)) if args.prompts else (),
        held_out=tuple(read_prompts(args.held_out)) if args.held_out else (),
        rows=args.rows,
        answer_tokens=args.max_tokens,
    )


def _discard(line: str) -> None:
    """Drop the progress line, because rank 0 prints it."""
