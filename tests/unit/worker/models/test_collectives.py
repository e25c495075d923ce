"""Collectives that a rank leaves out in a rehearsal."""

from __future__ import annotations

import pytest
import torch

from specdecode_worker.models import collectives


def test_a_rehearsal_calls_no_other_rank() -> None:
    """There is no process group here, so a collective that is not left out raises."""
    tensor = torch.arange(6.0).view(2, 3)
    with collectives.rehearsal():
        for collective in (collectives.all_reduce, collectives.broadcast, collectives.send_to_first):
            collective(tensor)
        gathered = collectives.gather(tensor, 4)
    assert torch.equal(gathered, torch.stack([tensor] * 4)), "the shape is right, and all values are finite"
    assert torch.equal(tensor, torch.arange(6.0).view(2, 3))
    with pytest.raises(ValueError, match="process group"):
        collectives.all_reduce(tensor)


def test_a_rehearsal_that_fails_is_over() -> None:
    with pytest.raises(RuntimeError, match="no memory"), collectives.rehearsal():
        raise RuntimeError("no memory")
    with pytest.raises(ValueError, match="process group"):
        collectives.broadcast(torch.zeros(1))
