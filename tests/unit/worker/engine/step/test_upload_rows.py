"""Block tables on the device: new blocks of all rows are sent together, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specdecode_worker.core import device_state
from specdecode_worker.core.device_state import DeviceState
from specdecode_worker.core.request import Request, Row
from specdecode_worker.engine.target import upload_rows
from support.small_llama import submit

CPU = torch.device("cpu")


def running(slot: int, blocks: list[int]) -> Request:
    request = Request.of(submit(slot, sampled=False, tokens=9), (), arrived_seconds=0.0)
    request.slot, request.blocks = slot, blocks
    return request


def test_new_blocks_are_appended_to_the_tables_of_their_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []
    right = device_state.to_device
    monkeypatch.setattr(device_state, "to_device", lambda *args: (sent.append(args[0]), right(*args))[1])
    state, requests = DeviceState(3, 256, torch.float32, CPU), [running(2, [5]), running(0, [7, 8]), running(1, [3])]
    rows = [Row(request, 1) for request in requests]
    upload_rows(state, rows)
    requests[0].blocks += [9, 4]
    requests[2].blocks += [6]
    upload_rows(state, rows)
    upload_rows(state, rows)
    assert [state.block_table_SM[slot, :4].tolist() for slot in range(3)] == [[7, 8, 0, 0], [3, 6, 0, 0], [5, 9, 4, 0]]
    assert sent == [[[2, 0, 0, 1], [0, 0, 1, 0], [5, 7, 8, 3]], [[2, 2, 1], [1, 2, 1], [9, 4, 6]]]
