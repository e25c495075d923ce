"""Verification of drafted trees, in plain torch: coupled sampling, and multi-round speculative sampling.

Suffixes: B sequences, N nodes of the widest tree with the root first, V vocabulary. ``parents_BN`` holds each node's
parent (the root's and padding's are -1), ``tokens_BN`` each node's token; siblings stand in order of rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specdecode_kernels.noise.reference import COIN_STREAM, RESIDUAL_STREAM, gumbel, uniform
from specdecode_kernels.sample.reference import processed


@dataclass(frozen=True, slots=True)
class Accepted:
    """``path_BD`` holds the accepted nodes behind the root, in order, -1 where there is none; ``count_B`` how many.
    ``bonus_B`` is the token that the target adds behind the last of them, ``last_B`` that node (0 is the root)."""

    path_BD: Tensor
    count_B: Tensor
    bonus_B: Tensor
    last_B: Tensor


def coupled_tokens(logp_RV: Tensor, seed_R: Tensor, position_R: Tensor) -> Tensor:
    """[R] argmax over v of log p(v) + g(seed, position, v): the token that plain decoding emits at ``position``.

    ``position`` is the absolute position of the token to be emitted, one behind the row's own.
    """
    return (logp_RV + gumbel(seed_R, position_R, logp_RV.shape[-1]).to(logp_RV.dtype)).argmax(-1)


def chosen_tokens(
    logits_RV: Tensor,
    temperature_R: Tensor,
    seed_R: Tensor,
    position_R: Tensor,
    truncation: tuple[Tensor, Tensor, Tensor] | None = None,
) -> Tensor:
    """[R] what plain decoding emits at ``position`` by these logits: argmax where temperature is 0, else
    coupled_tokens after temperature and ``truncation`` (top-k, top-p, min-p)."""
    nothing = (torch.zeros_like(position_R), torch.ones_like(temperature_R), torch.zeros_like(temperature_R))
    greedy_R = temperature_R == 0
    logp_RV = processed(logits_RV, torch.where(greedy_R, 1.0, temperature_R), *(truncation or nothing))
    return torch.where(greedy_R, logits_RV.argmax(-1), coupled_tokens(logp_RV, seed_R, position_R))


def walk(parents_BN: Tensor, tokens_BN: Tensor, chosen_BN: Tensor, max_depth: int) -> Accepted:
    """Follows from the root the child whose token is the one chosen at its parent, as far as there is one.

    ``chosen_BN`` is the target's token behind each node. Because it is what plain decoding would emit there, the
    accepted path plus the bonus is plain decoding's text, whatever the tree. Fixed number of rounds, no host sync.
    """
    rows = torch.arange(parents_BN.shape[0], device=parents_BN.device)
    at_B = torch.zeros_like(rows)
    alive_B = torch.ones_like(rows, dtype=torch.bool)
    path = []
    for _ in range(max_depth):
        hit_BN = (parents_BN == at_B[:, None]) & (tokens_BN == chosen_BN[rows, at_B][:, None])
        alive_B = alive_B & hit_BN.any(-1)
        at_B = torch.where(alive_B, hit_BN.int().argmax(-1), at_B)
        path.append(torch.where(alive_B, at_B, -1))
    path_BD = torch.stack(path, dim=-1) if path else at_B.new_empty((len(rows), 0))
    return Accepted(path_BD, (path_BD >= 0).sum(-1), chosen_BN[rows, at_B], at_B)


def multi_round(
    parents_N: Tensor, tokens_N: Tensor, logp_NV: Tensor, logq_NV: Tensor | None, seed: int, position: int
) -> tuple[list[int], int]:
    """(accepted nodes, bonus token) of one tree by multi-round speculative sampling (SpecInfer, arXiv 2305.09781).

    At each node its children are tried in turn. With ``logq_NV`` (the draft's distribution at each node, from which
    its children were sampled without replacement) child x is accepted with chance min(1, p(x)/q(x)), else p becomes
    the normalised positive part of p - q and q loses x. Without it, and where q gives nothing to x (a draft of fewer
    tokens than siblings), the proposal is deterministic: x is accepted with chance p(x), else p loses x. When none is
    left the token is drawn from what remains of p, at an accepted leaf
    from the whole of p. ``position`` is the root's. Coins are drawn per node, so none is used twice.
    """
    accepted: list[int] = []
    node = 0
    seed_1 = torch.tensor([seed])
    while True:
        here = torch.tensor([position + 1 + len(accepted)])
        p_V = logp_NV[node].exp()
        q_V = None if logq_NV is None else logq_NV[node].exp()
        coins_N = uniform(seed_1, here, parents_N.shape[0], COIN_STREAM)[0]
        taken = -1
        for child in torch.nonzero(parents_N == node).flatten().tolist():
            x = int(tokens_N[child])
            chance = p_V[x] / q_V[x] if q_V is not None and q_V[x] > 0 else p_V[x]
            if coins_N[child] < chance:
                taken = child
                break
            p_V, q_V = _residual(p_V, q_V, x)
        if taken < 0:
            noise_V = gumbel(seed_1, here, p_V.shape[0], RESIDUAL_STREAM)[0]
            return accepted, int((p_V.log() + noise_V).argmax())
        accepted.append(taken)
        node = taken


def _residual(p_V: Tensor, q_V: Tensor | None, x: int) -> tuple[Tensor, Tensor | None]:
    """What is left of p, and of q, once x was refused."""
    without_x = torch.ones_like(p_V)
    without_x[x] = 0
    if q_V is None or q_V[x] == 0:
        return _normalised(p_V * without_x, p_V), q_V
    return _normalised((p_V - q_V).clamp(min=0), p_V), _normalised(q_V * without_x, q_V * without_x)


def _normalised(x_V: Tensor, otherwise_V: Tensor) -> Tensor:
    """Rounding may leave nothing where next to nothing was left."""
    total = x_V.sum()
    return x_V / total if total > 0 else otherwise_V
