"""Masks of allowed tokens at the nodes of draft trees, for requests whose answers follow a grammar.

The mask of a node follows from the tokens on its path, so it is computed on the host once these are drafted. Drafts
propose under the same masks under which the target chooses. A node whose path the grammar does not allow has no mask:
the target's masked choice before it never equals its token, so what follows it is never emitted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdecode_kernels.transfer import to_device
from specdecode_worker.sampling.sampler import BatchTokens, SampledRows
from specdecode_worker.sampling.trees import Forest


class TokenGuide(Protocol):
    """Position of one request in its grammar; ``guided.guide.Guide`` implements it."""

    def mask(self, path: Sequence[int] = ()) -> NDArray[np.uint32] | None:
        """Return the tokens allowed behind a tree path as bits, or None if the path itself is not allowed."""
        ...


class TokenMasks:
    """Masks of one step. ``guides`` has one entry per sequence of the batch, None for those without a grammar."""

    def __init__(
        self, guides: Sequence[TokenGuide | None], texts: BatchTokens, forest: Forest, vocab_size: int
    ) -> None:
        self._guides, self._texts, self._forest = guides, texts, forest
        self._vocab_size = vocab_size
        self._words = (vocab_size + 31) // 32
        self._all = np.full(self._words, 0xFFFFFFFF, dtype=np.uint32)
        self._masks: dict[tuple[int, int], NDArray[np.uint32]] = {}
        self._tokens: dict[int, list[int]] = {}
        self._table_NW: Tensor | None = None
        self._row_BN: Tensor | None = None

    def load_tokens(self) -> None:
        """Read the drafted tokens of guided sequences. Call it after drafting, before the target's pass is queued.

        On an accelerator this waits for the draft's passes. The masks are then computed while the target runs.
        """
        self._tokens = self._read([b for b, guide in enumerate(self._guides) if guide is not None])

    def prepare(self) -> None:
        """Compute the masks of all verified nodes of guided sequences and copy them to the device."""
        rows_BN, table_NW = self.verified()
        device = self._texts.roots_B.device
        self._row_BN = torch.from_numpy(rows_BN).to(device, non_blocking=True)
        self._table_NW = torch.from_numpy(table_NW.view(np.int32)).to(device, non_blocking=True)

    def verified(self) -> tuple[NDArray[np.int64], NDArray[np.uint32]]:
        """Compute the masks of all verified nodes. Call `load_tokens` before.

        Returns:
            The mask of each node [B, N], as a row of the masks [M, W], whose first one allows all tokens.
        """
        return self._table({b: self._forest.trees[b].verified for b in self._tokens})

    def of_roots(self) -> tuple[NDArray[np.int64], NDArray[np.uint32]]:
        """Compute the masks of the roots, which depend on no drafted token. The result is that of `verified`."""
        return self._table({b: 1 for b, guide in enumerate(self._guides) if guide is not None})

    def _table(self, counts: Mapping[int, int]) -> tuple[NDArray[np.int64], NDArray[np.uint32]]:
        """Compute the masks of the first nodes of some sequences; see `verified`."""
        rows, table = np.zeros(self._forest.parents_BN.shape, dtype=np.int64), [self._all]
        for b, count in counts.items():
            for node in range(count):
                rows[b, node] = len(table)
                table.append(self._mask(b, node, self._tokens.get(b, ())))
        return rows, np.stack(table)

    def blocked(self, rows: SampledRows) -> Tensor:
        """Return the tokens [R, V] that these nodes must not choose, as bool; none for sequences without a grammar."""
        b, node_R = rows.sequence_R, rows.node_R
        if self._table_NW is not None and self._row_BN is not None:
            bits_RW = self._table_NW[self._row_BN[b, node_R]]
        else:
            bits_RW = self._drafting(b.tolist(), node_R.tolist()).to(b.device)
        return _unpacked(~bits_RW)[:, : self._vocab_size]

    def _drafting(self, batch: Sequence[int], nodes: Sequence[int]) -> Tensor:
        """Return the masks [R, W] of nodes whose children are being drafted."""
        tokens = self._read([b for b in sorted(set(batch)) if self._guides[b] is not None])
        masks = np.empty((len(batch), self._words), dtype=np.uint32)
        for row, (b, node) in enumerate(zip(batch, nodes, strict=True)):
            masks[row] = self._mask(b, node, tokens[b]) if b in tokens else self._all
        return torch.from_numpy(masks.view(np.int32))

    def _mask(self, b: int, node: int, tokens: Sequence[int]) -> NDArray[np.uint32]:
        """Return the mask of one node; ``tokens`` are those of the sequence's tree from its first node on."""
        guide, key = self._guides[b], (b, node)
        assert guide is not None
        if key not in self._masks:
            mask = guide.mask([tokens[step - 1] for step in self._forest.trees[b].paths[node]])
            self._masks[key] = self._all if mask is None else mask
        return self._masks[key]

    def _read(self, batch: Sequence[int]) -> dict[int, list[int]]:
        """Read the tokens of the trees of these sequences from the device at once, without those of the roots."""
        counts = [len(self._forest.trees[b].parents) - 1 for b in batch]
        most = max(counts, default=0)
        if not most:
            return {b: [] for b in batch}
        texts, device = self._texts, self._texts.roots_B.device
        batch_G = to_device(list(batch), device)
        index_GM = texts.roots_B[batch_G, None] + torch.arange(1, most + 1, device=device)
        # A smaller tree at the end of the table of tokens has nothing behind its last node.
        index_GM.clamp_(max=texts.tokens_SP.shape[1] - 1)
        tokens: list[list[int]] = texts.tokens_SP[texts.slots_B[batch_G, None], index_GM].tolist()
        return {b: row[:count] for b, row, count in zip(batch, tokens, counts, strict=True)}


def _unpacked(bits_RW: Tensor) -> Tensor:
    """Return the bits [R, 32 W] of int32 words [R, W] as bool, the lowest bit first."""
    if bits_RW.device.type == "cpu":
        octets = bits_RW.numpy().view(np.uint8)
        return torch.from_numpy(np.unpackbits(octets, axis=1, bitorder="little").view(np.bool_))
    return unpacked_on_device(bits_RW)


def unpacked_on_device(bits_RW: Tensor) -> Tensor:
    """Return the same as `_unpacked` by operations that a graph can capture."""
    shifts_32 = torch.arange(32, dtype=torch.int32, device=bits_RW.device)
    return ((bits_RW[:, :, None] >> shifts_32) & 1).bool().flatten(1)
