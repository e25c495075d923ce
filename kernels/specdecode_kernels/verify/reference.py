"""Reference implementation of draft verification in plain PyTorch: coupled and multi-round speculative sampling.

Tensor suffixes: B sequences, N nodes of the largest tree with the root first, V vocabulary, R rows, D depth.
``parents_BN`` holds the parent of each node (-1 for the root and for padding), ``tokens_BN`` the token of each node.
Siblings are in order of rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specdecode_kernels.noise.reference import COIN_STREAM, RESIDUAL_STREAM, gumbel, uniform
from specdecode_kernels.sample.reference import Truncation, processed


@dataclass(frozen=True, slots=True)
class Accepted:
    """Accepted paths of a batch of trees.

    ``path_BD`` holds the accepted nodes after the root, in order, padded with -1, and ``count_B`` their number.
    ``bonus_B`` is the token that the target emits after the last accepted node.
    """

    path_BD: Tensor
    count_B: Tensor
    bonus_B: Tensor


def coupled_tokens(logp_RV: Tensor, seed_R: Tensor, position_R: Tensor) -> Tensor:
    """Return [R] argmax over v of log p(v) + g(seed, position, v): the token that plain decoding emits at ``position``.

    ``position`` is the absolute position of the token to emit, one after the position of the row's own token.
    """
    return (logp_RV + gumbel(seed_R, position_R, logp_RV.shape[-1])).argmax(-1)


def chosen_tokens(
    logits_RV: Tensor,
    temperature_R: Tensor,
    seed_R: Tensor,
    position_R: Tensor,
    truncation: Truncation | None = None,
) -> Tensor:
    """Return the tokens [R] that plain decoding emits at ``position`` from these logits.

    Rows of temperature 0 take the argmax. Other rows take `coupled_tokens` after temperature and ``truncation`` (top-k,
    top-p, min-p).
    """
    nothing = (torch.zeros_like(position_R), torch.ones_like(temperature_R), torch.zeros_like(temperature_R))
    greedy_R = temperature_R == 0
    logp_RV = processed(logits_RV, torch.where(greedy_R, 1.0, temperature_R), *(truncation or nothing))
    return torch.where(greedy_R, logits_RV.argmax(-1), coupled_tokens(logp_RV, seed_R, position_R))


def walk(parents_BN: Tensor, tokens_BN: Tensor, chosen_BN: Tensor, max_depth: int) -> Accepted:
    """Walk from the root to the child that holds the token chosen at its parent, until there is no such child.

    ``chosen_BN`` is the target's token after each node. It is the token that plain decoding would emit there, so the
    accepted path plus the bonus token equals the text of plain decoding for any tree. The number of steps is fixed, and
    the host never waits for the device.
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
    return Accepted(path_BD, (path_BD >= 0).sum(-1), chosen_BN[rows, at_B])


def multi_round(
    parents_N: Tensor, tokens_N: Tensor, logp_NV: Tensor, logq_NV: Tensor | None, seed: int, position: int
) -> tuple[list[int], int]:
    """Return (accepted nodes, bonus token) of one tree by multi-round speculative sampling.

    The children of a node are tried in order. ``logq_NV`` is the draft's distribution at each node, from which its
    children were sampled without replacement. Child x is accepted with probability min(1, p(x) / q(x)); after a
    rejection, p becomes the normalised positive part of p - q, and q loses x. Without ``logq_NV``, and where q(x) is 0
    (a draft with fewer tokens than siblings), the proposal is deterministic: x is accepted with probability p(x), and
    after a rejection p loses x. If no child is left, the bonus token is drawn from the remaining p; at an accepted leaf
    that is the whole p. ``position`` is the position of the root. Coins are drawn per node, so none is used twice.

    Reference: SpecInfer, arXiv 2305.09781.
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
    """Return the remaining p and q after x was rejected."""
    without_x = torch.ones_like(p_V)
    without_x[x] = 0
    if q_V is None or q_V[x] == 0:
        return _normalised(p_V * without_x, p_V), q_V
    return _normalised((p_V - q_V).clamp(min=0), p_V), _normalised(q_V * without_x, q_V * without_x)


def _normalised(x_V: Tensor, otherwise_V: Tensor) -> Tensor:
    """Divide by the sum, or return ``otherwise_V`` if rounding left nothing of a tiny remainder."""
    total = x_V.sum()
    return x_V / total if total > 0 else otherwise_V
