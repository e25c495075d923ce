"""Selection of the rows of a batch to which a sampling parameter applies.

The selected sequences are known on the host, but the sequence of each row is known only on the device. On a CPU the row
indices are computed, so that other rows cost nothing. On an accelerator reading them would wait for the device, so all
rows are processed and a mask selects the results. Both ways give the same result for each row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdecode_kernels.transfer import to_device


@dataclass(frozen=True, slots=True)
class Nodes:
    """Positions of R rows of logits: sequence of the batch, node of its tree, and depth of the node."""

    batch_R: Tensor
    node_R: Tensor
    depth_R: Tensor

    def __getitem__(self, rows: Tensor | slice) -> Nodes:
        """Return the positions of a subset of the rows."""
        return Nodes(self.batch_R[rows], self.node_R[rows], self.depth_R[rows])


@dataclass(frozen=True, slots=True)
class RowSelection:
    """Selection of rows.

    ``mask_R`` marks the selected rows (None: all). ``rows`` are the indices of the rows to process (None: all).
    """

    mask_R: Tensor | None
    rows: Tensor | None

    def of(self, x_R: Tensor) -> Tensor:
        """Return the rows of ``x_R`` to process."""
        return x_R if self.rows is None else x_R[self.rows]

    def nodes(self, at: Nodes) -> Nodes:
        """Return the positions of the rows to process."""
        return at if self.rows is None else at[self.rows]

    def merge(self, selected: Tensor, others: Callable[[], Tensor]) -> Tensor:
        """Return ``selected`` in selected rows and ``others()``, computed for all rows, elsewhere."""
        if self.mask_R is None:
            return selected
        if self.rows is not None:
            return others().index_copy(0, self.rows, selected)
        return torch.where(self.mask_R.view(-1, *[1] * (selected.dim() - 1)), selected, others())


class Group:
    """Subset of the sequences of a batch. ``any`` and ``all`` are known on the host."""

    def __init__(self, members: Sequence[bool], device: torch.device) -> None:
        self.any, self.all = any(members), all(members)
        self._mask_B = to_device(members, device) if self.any and not self.all else None

    def of(self, batch_R: Tensor) -> RowSelection:
        """Return the selection of the rows whose sequence ``batch_R`` is in the group."""
        if self._mask_B is None:
            return RowSelection(None, None)
        mask_R = self._mask_B[batch_R]
        return RowSelection(mask_R, torch.nonzero(mask_R)[:, 0] if mask_R.device.type == "cpu" else None)
