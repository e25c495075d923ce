"""A run killed with SIGKILL at random moments ends with the weights of an uninterrupted run, in real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from specdecode_worker.models.causal_lm import CausalLM
from specdecode_worker.training.conversations import Conversation, write_shard
from support.tiers import by_effort
from support.training_fixtures import TRAIN_SMALL

KILLS = by_effort(quick=3, full=3, nightly=10)
# A checkpoint every other step, so that some kills interrupt its writing.
FLAGS = ("--steps", "80", "--validate-steps", "2")


def test_run_resumed_after_kills_has_identical_weights(
    target: CausalLM, conversations: list[Conversation], tmp_path: Path
) -> None:
    recorded = tmp_path / "recorded"
    recorded.mkdir()
    write_shard(recorded, 0, conversations * 2)

    def run(name: str, *more: str) -> str:
        command = [sys.executable, str(TRAIN_SMALL), str(recorded), str(tmp_path / name), *FLAGS, *more]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.run(
            command, check=True, env=environment, timeout=280, stdout=subprocess.PIPE, text=True
        ).stdout

    run("whole")
    (tmp_path / "killed").mkdir()
    assert run("killed", "--kills", str(KILLS)).strip() == str(KILLS), "the run was over before its last kill"
    whole, resumed = (load_file(tmp_path / name / "weights.safetensors") for name in ("whole", "killed"))
    for name, tensor in whole.items():
        assert torch.equal(resumed[name], tensor), name
