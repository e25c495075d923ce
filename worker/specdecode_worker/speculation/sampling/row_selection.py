"""Rows of a batch, and the part of them that something concerns.

Who is concerned depends on the request, and the rows' requests are on the device. Looking there costs nothing on a
CPU, so that rows which ask for nothing pay nothing; on an accelerator looking would wait, so all rows do the work and
a mask says whose result counts. What a row gets is the same either way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdecode_kernels.transfer import to_device


@dataclass(frozen=True, slots=True)
class Nodes:
    """Where R rows of logits belong: sequence of the batch, node of its tree, and the node's depth."""

    batch_R: Tensor
    node_R: Tensor
    depth_R: Tensor

    def __getitem__(self, rows: Tensor | slice) -> Nodes:
        return Nodes(self.batch_R[rows], self.node_R[rows], self.depth_R[rows])


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of which ``mask_R`` (None: all) are meant; ``rows`` (None: all) do the work."""

    mask_R: Tensor | None
    rows: Tensor | None

    def of(self, x_R: Tensor) -> Tensor:
        return x_R if self.rows is None else x_R[self.rows]

    def nodes(self, at: Nodes) -> Nodes:
        return at if self.rows is None else at[self.rows]

    def merge(self, found: Tensor, others: Callable[[], Tensor]) -> Tensor:
        """``found`` where meant, ``others()``, of all rows, elsewhere."""
        if self.mask_R is None:
            return found
        if self.rows is not None:
            return others().index_copy(0, self.rows, found)
        return torch.where(self.mask_R.view(-1, *[1] * (found.dim() - 1)), found, others())


class Group:
    """The sequences of a batch for which something holds, ``any`` and ``all`` as the host knows."""

    def __init__(self, members: Sequence[bool], device: torch.device) -> None:
        self.any, self.all = any(members), all(members)
        self._mask_B = to_device(members, device) if self.any and not self.all else None

    def of(self, batch_R: Tensor) -> Part:
        if self._mask_B is None:
            return Part(None, None)
        mask_R = self._mask_B[batch_R]
        return Part(mask_R, torch.nonzero(mask_R)[:, 0] if mask_R.device.type == "cpu" else None)
