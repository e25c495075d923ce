"""Command ``train``: train a draft on the target's own answers or on a text.

The work is done by ``training.recipe``.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from specdecode_worker.commands.flags import print_progress, settings_of
from specdecode_worker.contract import adapted_uri
from specdecode_worker.engine.factory import device_of
from specdecode_worker.models.causal_lm import CausalLM
from specdecode_worker.models.drafts import load_draft
from specdecode_worker.models.errors import ModelError
from specdecode_worker.models.weights import load_causal_lm
from specdecode_worker.training.artifacts import Ancestor, check_same_target
from specdecode_worker.training.conversations import Chat
from specdecode_worker.training.errors import TrainingError
from specdecode_worker.training.prompts import read_prompts
from specdecode_worker.training.recipe import DraftSettings, RecordingSettings, record_answers, train_draft
from specdecode_worker.training.split_target import TargetPlacement, placed_target
from specdecode_worker.training.trainer import TrainSettings


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
    device = device_of(args.device)
    target = Ancestor.of(adapted_uri(args.model, args.adapter), args.cache_dir)
    placement = settings_of(TargetPlacement, args, folder=target.folder, device=device, size=args.tensor_parallel_size)
    recording = settings_of(
        RecordingSettings,
        args,
        prompts=tuple(read_prompts(args.prompts)) if args.prompts else (),
        held_out=tuple(read_prompts(args.held_out)) if args.held_out else (),
        answer_tokens=args.max_tokens,
    )
    check_same_target(args.out / "recorded", target)
    record_answers(placement, Chat(target.folder), recording, args.seed, args.out, print_progress)
    with placed_target(placement) as network:
        draft_settings = _draft_settings(args, network, target)
        return train_draft(
            network,
            settings_of(TrainSettings, args, minutes=0.0 if args.steps else args.minutes),
            draft_settings,
            args.out,
            print_progress,
            whole=_whole_target(placement, draft_settings),
        )


def _whole_target(placement: TargetPlacement, draft_settings: DraftSettings) -> CausalLM | None:
    """Return the target in host memory if layers of a draft have to start from some that the devices share."""
    if placement.size == 1 or not draft_settings.starts_layers:
        return None
    return load_causal_lm(placement.folder, dtype=getattr(torch, placement.dtype), device=torch.device("cpu"))


def _draft_settings(args: argparse.Namespace, network: CausalLM, target: Ancestor) -> DraftSettings:
    """Build the description of the draft to train, with the draft that it continues from."""
    origin = parent = None
    if args.draft:
        parent = Ancestor.of(args.draft, args.cache_dir)
        cpu = torch.device("cpu")
        origin = load_draft(
            args.method, parent.folder, network, target_folder=target.folder, dtype=torch.float32, device=cpu
        )
    return settings_of(
        DraftSettings, args, target=target, origin=origin, parent=parent, normalise=not args.no_normalisers
    )
