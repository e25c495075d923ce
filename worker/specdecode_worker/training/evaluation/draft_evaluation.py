"""Evaluation of a draft on prompts: acceptance by depth, tokens per step and speedup on this machine, by domain.

The target's greedy text is recorded once, and acceptance comes from ``acceptance_replay``. Step times are measured on
this machine with one sequence, because the speedup and the advised depth depend on them as well as on acceptance.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from specdecode_worker.contract import TreeShape
from specdecode_worker.models.configs.target_states import TargetStates
from specdecode_worker.models.networks.eagle3 import Eagle3Head
from specdecode_worker.models.networks.layers import Attend
from specdecode_worker.models.networks.llama import Llama
from specdecode_worker.training.data.shards import Conversation
from specdecode_worker.training.evaluation.acceptance_replay import StepCounts, distinct_ngrams, target_token_ranks

CONTEXT = 256  # tokens of context at which steps are timed
_TIMED = 15


def evaluate(
    target: Llama, head: Eagle3Head, conversations: Sequence[Conversation], shape: TreeShape
) -> dict[str, Any]:
    """Return the document of ``eval``: results for ``shape`` overall and by domain, and the best chain."""
    depth = max(shape.depths)
    ranks = _all_ranks(target, head, conversations, depth)
    times = StepTimes(target, head)
    domains: dict[str, list[int]] = defaultdict(list)
    for i, conversation in enumerate(conversations):
        domains[conversation.domain].append(i)
    parts = {"overall": list(range(len(conversations))), **dict(sorted(domains.items()))}
    figures = {
        name: _figures([conversations[i] for i in which], [ranks[i] for i in which], shape, times)
        for name, which in parts.items()
    }
    overall = figures.pop("overall")
    return {
        "shape": list(shape.parents),
        "conversations": len(conversations),
        "tokens": sum(_answer_length(c) for c in conversations),
        "vocabulary_coverage": _coverage(target, head, conversations),
        "overall": overall,
        "domains": figures,
        "step_milliseconds": {
            "plain": round(times.plain * 1e3, 3),
            "speculative": round(times.speculative(shape) * 1e3, 3),
        },
    }


def _figures(
    conversations: Sequence[Conversation], ranks: Sequence[Tensor], shape: TreeShape, times: StepTimes
) -> dict[str, Any]:
    """Return the results of some conversations: acceptance, tokens per step, speedup and the best chain."""
    counts = count_steps_of_ranks(ranks, shape)
    chains = {d: TreeShape.chain(d) for d in range(1, ranks[0].shape[1] + 1)}
    speedups = {
        d: times.speedup(count_steps_of_ranks(ranks, chain).tokens_per_step, chain) for d, chain in chains.items()
    }
    best = max(speedups, key=lambda d: speedups[d])
    return {
        "tokens_per_step": round(counts.tokens_per_step, 4),
        "acceptance": [round(a, 4) for a in counts.acceptance],
        "distinct_4grams": round(distinct_ngrams([c.tokens_N[c.answer_start :].tolist() for c in conversations]), 4),
        "speedup": round(times.speedup(counts.tokens_per_step, shape), 3),
        "advice": f"chain:{best}, {speedups[best]:.2f} times plain" if speedups[best] > 1 else "none: plain is faster",
    }


def count_steps_of_ranks(ranks: Sequence[Tensor], shape: TreeShape) -> StepCounts:
    """Return the step counts of ``shape`` over the ranks of several conversations."""
    counts = StepCounts()
    for ranks_IK in ranks:
        counts.walk(ranks_IK, shape)
    return counts


def _all_ranks(target: Llama, head: Eagle3Head, conversations: Sequence[Conversation], depth: int) -> list[Tensor]:
    ranks = []
    for start in range(0, len(conversations), 8):
        ranks += target_token_ranks(head, conversations[start : start + 8], target.lm_head.weight, depth)
    return ranks


def _answer_length(conversation: Conversation) -> int:
    return len(conversation.tokens_N) - conversation.answer_start


@torch.inference_mode()
def _coverage(target: Llama, head: Eagle3Head, conversations: Sequence[Conversation]) -> float:
    """Return the mean probability that the target gives to the tokens of the draft vocabulary."""
    shares = [
        torch.softmax(target.logits(c.hidden_NE[c.answer_start :]).float(), dim=-1)[:, head.target_ids].sum(dim=-1)
        for c in conversations
    ]
    return round(float(torch.cat(shares).mean()), 4)


class StepTimes:
    """Seconds per step of one sequence on this machine: the networks alone, without an engine."""

    def __init__(self, target: Llama, head: Eagle3Head) -> None:
        self._target, self._head = target, head
        self._verify: dict[int, float] = {}
        self.plain = self._verified(1)
        self._draft_pass = _timed(self._draft_once)

    def speculative(self, shape: TreeShape) -> float:
        """Return the seconds of a speculative step of ``shape``: one verification and one draft pass per depth."""
        return self._verified(1 + shape.nodes) + max(shape.depths) * self._draft_pass

    def speedup(self, tokens_per_step: float, shape: TreeShape) -> float:
        """Return the speedup over plain decoding."""
        return tokens_per_step * self.plain / self.speculative(shape)

    def _verified(self, tokens: int) -> float:
        """Return the seconds of a target pass over ``tokens`` tokens, measured once."""
        if tokens not in self._verify:
            self._verify[tokens] = _timed(lambda: self._target_once(tokens))
        return self._verify[tokens]

    def _target_once(self, tokens: int) -> None:
        positions = torch.arange(CONTEXT, CONTEXT + tokens)
        out = self._target(
            torch.ones_like(positions), positions, ZeroContextAttention(), TargetStates(self._target.config.aux_layers)
        )
        self._target.logits(out.hidden_TE).argmax(dim=-1)

    def _draft_once(self) -> None:
        hidden = torch.zeros(1, self._head.config.hidden_size, dtype=self._head.fc.weight.dtype)
        self._head.logits(
            self._head(hidden, torch.ones(1, dtype=torch.int64), torch.tensor([CONTEXT]), ZeroContextAttention())
        ).topk(1)


class ZeroContextAttention(Attend):
    """Attention over a context of zeros and the new tokens, to time a pass behind a context."""

    def __call__(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        """Return the attended values, see ``layers.Attend``."""
        before = k_TKD.new_zeros(CONTEXT, *k_TKD.shape[1:])
        keys, values = (torch.cat((before, x)).transpose(0, 1)[None] for x in (k_TKD, v_TKD))
        q = q_THD.transpose(0, 1)[None]
        return F.scaled_dot_product_attention(q, keys, values, enable_gqa=True)[0].transpose(0, 1)


@torch.inference_mode()
def _timed(once: Callable[[], None]) -> float:
    """Return the median seconds of ``once``, after warmup."""
    for _ in range(3):
        once()
    seconds = []
    for _ in range(_TIMED):
        started = time.perf_counter()
        once()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)
