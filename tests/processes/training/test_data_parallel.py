"""Two ranks train the same weights as one rank with all batches, in real processes over gloo on loopback."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from specdecode_worker.models.causal_lm import CausalLM
from specdecode_worker.training.conversations import Conversation, write_shard
from support.training_fixtures import TRAIN_SMALL


def ranked(recorded: Path, out: Path, ranks: int) -> dict[str, torch.Tensor]:
    """Return the weights and loss of a run of six steps of two batches on ``ranks`` processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ways = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(TRAIN_SMALL), str(recorded), str(out), "--steps", "6", "--accumulate", "2"]
    processes = [subprocess.Popen(command, env={**os.environ, **ways, "RANK": str(rank)}) for rank in range(ranks)]
    assert [process.wait(timeout=240) for process in processes] == [0] * ranks
    return load_file(out / "weights.safetensors") | {"loss_sum": torch.tensor(float((out / "loss_sum").read_text()))}


def test_two_ranks_equal_one_rank_with_accumulation(
    target: CausalLM, conversations: list[Conversation], tmp_path: Path
) -> None:
    recorded = tmp_path / "recorded"
    recorded.mkdir()
    write_shard(recorded, 0, conversations * 4)
    alone, together = (ranked(recorded, tmp_path / str(count), count) for count in (1, 2))
    assert alone.keys() == together.keys()
    for name, tensor in alone.items():
        torch.testing.assert_close(together[name], tensor, rtol=0, atol=1e-5 if name == "loss_sum" else 1e-6)
