"""Paired step times of two drafts on this machine, measured in alternation so that drift affects both equally.

Only the networks are timed, with one sequence. The target's verification of the shape is timed once per round and
counts for both. A draft adds one pass per depth of the shape.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch

from specdecode_worker.contract import TreeShape
from specdecode_worker.models.configs.target_states import TargetStates
from specdecode_worker.models.networks.eagle3 import Eagle3Head
from specdecode_worker.models.networks.llama import Llama
from specdecode_worker.training.evaluation.draft_evaluation import CONTEXT, ZeroContextAttention
from specdecode_worker.training.evaluation.draft_verdict import StepCosts

ROUNDS = 40
_WARM = 2


@torch.inference_mode()
def step_costs(
    target: Llama, deployed: Eagle3Head, candidate: Eagle3Head, shape: TreeShape, *, rounds: int = ROUNDS
) -> StepCosts:
    """Return the seconds per step by round, on a CPU processor seconds. The two drafts alternate in going first."""
    depth = max(shape.depths)
    verify = _verification(target, 1 + shape.nodes)
    drafts = (_draft_pass(deployed), _draft_pass(candidate))
    on_gpu = target.lm_head.weight.is_cuda
    seconds_R2 = np.zeros((rounds, 2))
    for number in range(-_WARM, rounds):
        verified = _seconds(verify, on_gpu=on_gpu)
        for which in (0, 1) if number % 2 else (1, 0):
            drafted = sum(_seconds(drafts[which], on_gpu=on_gpu) for _ in range(depth))
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


def _draft_pass(head: Eagle3Head) -> Callable[[], object]:
    """Return a function that runs one draft pass over one token."""
    device = head.fc.weight.device
    hidden = torch.zeros(1, head.config.hidden_size, dtype=head.fc.weight.dtype, device=device)
    token = torch.ones(1, dtype=torch.int64, device=device)
    position = torch.tensor([min(CONTEXT, head.config.max_position_embeddings - 1)], device=device)
    return lambda: head.logits(head(hidden, token, position, ZeroContextAttention())).topk(1)
