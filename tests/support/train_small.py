"""Script that trains a small head in fp32 with the trainer's own checkpoints, for tests with kills.

With ``--kills`` it trains in child processes and kills them. The file ``last_step`` in the output folder holds the
number of the last step.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from specdecode_worker.training.conversations import Conversation, DataSet
from specdecode_worker.training.heads import new_head
from specdecode_worker.training.trainer import Trainer, TrainSettings
from support.training_fixtures import small_target


class StepReportingTrainer(Trainer):
    """Trainer that writes the number of each completed step to ``last_step``."""

    last_step: Path

    def step(self, group: list[list[Conversation]]) -> float:
        loss = super().step(group)
        self.last_step.write_text(f"{self.progress.step}")
        return loss


def train(args: argparse.Namespace, out: Path) -> None:
    """Train to the end from the checkpoint in ``out`` and write the weights."""
    torch.set_num_threads(1)
    out.mkdir(exist_ok=True)
    target = small_target()
    settings = TrainSettings(
        steps=args.steps,
        learning_rate=3e-3,
        batch_tokens=40,
        depth=2,
        accumulate=args.accumulate,
        validate_every=3600.0,
        validate_steps=args.validate_steps,
    )
    data = DataSet(args.recorded, validation=2)
    run = StepReportingTrainer(new_head(target, torch.arange(0, 64, 2)), target.lm_head.weight, data, settings)
    run.last_step = out / "last_step"
    run.restore(out)
    run.run(out, lambda _: None, lambda _: None)
    save_file(dict(run.master.state_dict()), out / "weights.safetensors")


def fork_training(args: argparse.Namespace, out: Path) -> int:
    """Fork a process that trains and return its pid. A fork avoids importing all modules again."""
    pid = os.fork()
    if pid == 0:
        train(args, out)
        os._exit(0)
    return pid


def train_with_kills(args: argparse.Namespace, out: Path) -> int:
    """Train to the end with repeated kills and return the number of kills.

    Each kill happens 1 to 5 steps after the one before, at a random moment of the step.
    """
    rng = random.Random(args.seed)
    for count in range(args.kills):
        last = _read_last_step(out) + rng.randint(1, 5)
        pid = fork_training(args, out)
        while os.waitpid(pid, os.WNOHANG)[0] == 0:
            if _read_last_step(out) >= last:
                time.sleep(rng.random() * 0.02)
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                break
            time.sleep(0.002)
        else:
            return count
    os.waitpid(fork_training(args, out), 0)
    return int(args.kills)


def _read_last_step(out: Path) -> int:
    """Return the number of the last step, or 0 while the file is missing or being written."""
    path = out / "last_step"
    return int(path.read_text() or 0) if path.exists() else 0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("recorded", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--validate-steps", type=int, default=0)
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.kills:
        print(train_with_kills(args, args.out))
    else:
        train(args, args.out)


if __name__ == "__main__":
    main()
