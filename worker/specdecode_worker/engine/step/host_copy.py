"""Results on their way back to the host: copies that only their reader waits for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Arrival:
    """When copies are over; None where nothing has to be copied."""

    event: torch.cuda.Event | None = None

    def wait(self) -> None:
        """Waits for these copies alone, and not for what was queued since."""
        if self.event is not None:
            self.event.synchronize()


def to_host(tensors: Sequence[Tensor], *, overwritten: bool = False) -> tuple[list[Tensor], Arrival]:
    """Queues copies to the host, before whatever is queued next; they hold what is meant once the arrival is there.
    Tensors of a CPU are left as they are, unless they will be ``overwritten`` by then."""
    if not tensors or not tensors[0].is_cuda:
        return [tensor.clone() if overwritten else tensor for tensor in tensors], Arrival()
    found = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors]
    for copy, tensor in zip(found, tensors, strict=True):
        copy.copy_(tensor, non_blocking=True)
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return found, Arrival(event)
