"""Sampling of the roots that parallel drafts are trained from: fewer at deeper depths, and others in every step.

A root that is dropped at one depth is dropped at all deeper ones, because deeper slots attend to the shallower ones.
Every depth trains the first roots of one random order.

Shape suffixes: B texts, A answer slots, R roots of a depth, E hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

RootShare = Callable[[int], float]
"""Function from a depth to the share of its roots that is trained. It never rises with the depth."""


def all_roots(k: int) -> float:
    """Return the share of a draft that is trained from every root: 1."""
    return 1.0


def root_count(slots: int, k: int, share: RootShare) -> int:
    """Return the number of roots of a text with ``slots`` answer slots that are trained at depth ``k``."""
    return math.ceil(max(slots - k, 0) * share(k))


def root_order(valid_BA: Tensor, depth: int, sample_seed: int | None) -> Tensor:
    """Return the order [B, A] of the roots: every depth trains the first ones. None keeps the order of the text.

    The last roots of a text, which have no slots at the deepest depths, come last, in the order of the text.
    """
    place_BA = torch.arange(valid_BA.shape[1], device=valid_BA.device).expand(valid_BA.shape)
    if sample_seed is None:
        return place_BA
    generator = torch.Generator().manual_seed(sample_seed)
    random_BA = torch.rand(valid_BA.shape, generator=generator).to(valid_BA.device)
    whole_B1 = valid_BA.sum(dim=1, keepdim=True) - depth + 1
    return torch.where(place_BA < whole_B1, random_BA, 1.0 + place_BA).argsort(dim=1)


def trained_mask(valid_BA: Tensor, roots: int, k: int, share: RootShare) -> Tensor:
    """Return the mask [B, R] of the first ``roots`` roots that `root_count` counts for each text."""
    slots_B1 = (valid_BA.sum(dim=1, keepdim=True) - k).clamp(min=0)
    counts_B1 = (slots_B1.double() * share(k)).ceil()
    return torch.arange(roots, device=valid_BA.device) < counts_B1


def by_slot(state_BRE: Tensor, slot_BR: Tensor, trained_BR: Tensor, valid_BA: Tensor) -> tuple[Tensor, Tensor]:
    """Return the states by answer slot [B, A, E], zero where no root is trained, and the mask [B, A] of the others."""
    rows, answers = valid_BA.shape
    to_BR = torch.where(trained_BR, slot_BR, answers)  # the last column takes what is not trained
    state_BAE = state_BRE.new_zeros(rows, answers + 1, state_BRE.shape[-1])
    state_BAE = state_BAE.scatter(1, to_BR[:, :, None].expand_as(state_BRE), state_BRE)
    return state_BAE[:, :answers], valid_BA.new_zeros(rows, answers + 1).scatter(1, to_BR, trained_BR)[:, :answers]
