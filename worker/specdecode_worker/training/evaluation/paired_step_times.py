"""Paired step times of two drafts on this machine, measured in alternation so that drift affects both equally.

Only the networks are timed, with one sequence. The target's verification of the shape is timed once per round and
counts for both. A draft adds one pass per depth of the shape, a parallel draft one pass for all of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from specdecode_worker.contract import TreeShape
from specdecode_worker.models.checkpoints.draft_weights import Draft
from specdecode_worker.models.configs.target_states import TargetStates
from specdecode_worker.models.networks.dflash import DFlashHead
from specdecode_worker.models.networks.eagle3 import Eagle3Head
from specdecode_worker.models.networks.llama import Llama
from specdecode_worker.models.networks.peagle import PEagleHead
from specdecode_worker.training.evaluation.draft_evaluation import CONTEXT, ZeroContextAttention
from specdecode_worker.training.evaluation.draft_verdict import StepCosts

ROUNDS = 40
_WARM = 2


@torch.inference_mode()
def step_costs(
    target: Llama, deployed: Draft, candidate: Draft, shape: TreeShape, *, rounds: int = ROUNDS
) -> StepCosts:
    """Return the seconds per step by round, on a CPU processor seconds. The two drafts alternate in going first."""
    depth = max(shape.depths)
    verify = _verification(target, 1 + shape.nodes)
    drafts = (_draft_step(deployed, depth), _draft_step(candidate, depth))
    on_gpu = target.lm_head.weight.is_cuda
    seconds_R2 = np.zeros((rounds, 2))
    for number in range(-_WARM, rounds):
        verified = _seconds(verify, on_gpu=on_gpu)
        for which in (0, 1) if number % 2 else (1, 0):
            drafted = _seconds(drafts[which], on_gpu=on_gpu)
            if number >= 0:
                seconds_R2[number, which] = verified + drafted
    return StepCosts(seconds_R2[:, 0], seconds_R2[:, 1])


def _seconds(once: Callable[[], object], *, on_gpu: bool) -> float:
    """Return the seconds of a call.

    On a CPU these are processor seconds over all threads, which exclude the load of other processes.
    """
    if not on_gpu:
        began = time.process_time()
        once()
        return time.process_time() - began
    torch.cuda.synchronize()
    began = time.perf_counter()
    once()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def _verification(target: Llama, tokens: int) -> Callable[[], object]:
    """Return a function that runs one verification pass over ``tokens`` tokens."""
    # The tokens follow a context, shortened if the model has too few positions.
    first = min(CONTEXT, target.config.max_position_embeddings - tokens)
    positions = first + torch.arange(tokens, device=target.lm_head.weight.device)

    def verify() -> object:
        out = target(
            torch.ones_like(positions), positions, ZeroContextAttention(), TargetStates(target.config.aux_layers)
        )
        return target.logits(out.hidden_TE).argmax(dim=-1)

    return verify


def _draft_step(draft: Draft, depth: int) -> Callable[[], object]:
    """Return a function that runs the draft passes of one step for a chain of ``depth`` tokens."""
    match draft:
        case PEagleHead():
            return _head_pass(draft, slots=depth)
        case DFlashHead():
            return _block_pass(draft, depth)
        case Eagle3Head():
            run = _head_pass(draft, slots=1)
            return lambda: [run() for _ in range(depth)]
    raise TypeError(f"{type(draft).__name__} is not distilled")


def _head_pass(head: Eagle3Head, slots: int) -> Callable[[], object]:
    """Return a function that runs one pass of a head over ``slots`` slots of one sequence."""
    weight = head.fc.weight
    hidden = torch.zeros(slots, head.config.hidden_size, dtype=weight.dtype, device=weight.device)
    tokens, positions = _slots(slots, head.config.max_position_embeddings, weight.device)
    return lambda: head.logits(head(hidden, tokens, positions, ZeroContextAttention())).topk(1)


def _block_pass(head: DFlashHead, depth: int) -> Callable[[], object]:
    """Return a function that reads the target's states of one token, and runs a block of ``depth`` mask slots."""
    weight = head.fc.weight
    states = torch.zeros(1, weight.shape[1], dtype=weight.dtype, device=weight.device)
    tokens, positions = _slots(depth + 1, head.config.max_position_embeddings, weight.device)

    def run() -> object:
        head.context(states, positions[:1])
        return head.logits(head(tokens, positions, ZeroContextAttention())[1:]).topk(1)

    return run


def _slots(count: int, positions: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the tokens and positions of ``count`` slots behind a context, shortened for a model of few positions."""
    first = min(CONTEXT, positions - count)
    return torch.ones(count, dtype=torch.int64, device=device), first + torch.arange(count, device=device)
