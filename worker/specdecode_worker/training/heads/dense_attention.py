"""Attention over a dense key-value cache for rollouts: one token per row and step, rows at different lengths.

Reading keys dominates the attention time of a rollout, and a group of rows is read up to the length of its longest row.
The rows are therefore kept roughly sorted by length. Whenever a row starts a new conversation its place moves towards
the short end, one swap per group and step.

Shape suffixes: B rows, P places, T tokens of the pass, H query heads, K key-value heads, G queries per key-value head,
L positions, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from specdecode_worker.models.configs.model_config import LlamaConfig

GROUPS = 8


class DenseCache:
    """Attention over keys and values stored as [layer, place, kv head, position, head dim].

    ``step`` sets the position of each row's next token. A row is reused by starting at position 0: the mask hides keys
    of an earlier conversation. Callers count in rows; places are the internal order of the cache.
    """

    def __init__(
        self, config: LlamaConfig, rows: int, positions: int, *, dtype: torch.dtype, device: torch.device | None = None
    ) -> None:
        shape = (config.num_hidden_layers, rows, config.num_key_value_heads, positions, config.head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros_like(self.keys)
        self._row_at_P = torch.arange(rows, device=device)
        self._place_of_B = torch.arange(rows, device=device)
        self._positions_P = torch.zeros(rows, dtype=torch.int64, device=device)
        self._groups = [group for group in torch.arange(rows, device=device).tensor_split(GROUPS) if len(group)]
        self._masks: list[Tensor] = []

    def step(self, positions_B: Tensor) -> None:
        """Set the position of every row's next token and update order and masks."""
        self._positions_P = positions_B[self._row_at_P]
        for longer, shorter in zip(self._groups, self._groups[1:], strict=False):
            self._sort(
                int(longer[self._positions_P[longer].argmin()]), int(shorter[self._positions_P[shorter].argmax()])
            )
        self._masks = [_additive_mask(self._positions_P[group], self.keys.dtype) for group in self._groups]

    def _sort(self, first: int, second: int) -> None:
        """Swap two places unless the first holds the longer row already."""
        swapped, places = torch.tensor([[second, first], [first, second]], device=self.keys.device)
        length = int(self._positions_P[second])
        if length <= int(self._positions_P[first]):
            return
        for cache in (self.keys, self.values):
            cache[:, places, :, :length] = cache[:, swapped, :, :length]
        self._positions_P[places] = self._positions_P[swapped]
        self._row_at_P[places] = self._row_at_P[swapped]
        self._place_of_B[self._row_at_P[places]] = places

    def __call__(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        """Store the new keys and values and return the attended values, see ``layers.Attend``."""
        keys, values = self.keys[layer], self.values[layer]
        places = torch.arange(len(self._row_at_P), device=q_THD.device)
        keys[places, :, self._positions_P] = k_TKD[self._row_at_P]
        values[places, :, self._positions_P] = v_TKD[self._row_at_P]
        # The queries that share a kv head form the rows of one small matrix, so that no key is repeated.
        q_PKGD = q_THD[self._row_at_P].view(len(places), k_TKD.shape[1], -1, q_THD.shape[-1])
        outs = []
        for group, mask_P11L in zip(self._groups, self._masks, strict=True):
            here, longest = slice(int(group[0]), int(group[-1]) + 1), mask_P11L.shape[-1]
            mask = mask_P11L.expand(*q_PKGD[here].shape[:3], longest)
            read = (keys[here, :, :longest], values[here, :, :longest])
            outs.append(F.scaled_dot_product_attention(q_PKGD[here], *read, attn_mask=mask))
        return torch.cat(outs)[self._place_of_B].flatten(1, 2)


def _additive_mask(positions_P: Tensor, dtype: torch.dtype) -> Tensor:
    """Return an additive mask, [P, 1, 1, L]. With a boolean mask the processor's attention is many times slower."""
    beyond = torch.arange(int(positions_P.max()) + 1, device=positions_P.device) > positions_P[:, None]
    return torch.zeros(beyond.shape, dtype=dtype, device=positions_P.device).masked_fill_(beyond, float("-inf"))[
        :, None, None
    ]
