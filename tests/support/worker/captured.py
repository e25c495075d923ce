"""Distinguishable records for tests."""

from __future__ import annotations

from specdecode_worker.capture import Record
from specdecode_worker.sampling.params import Sampling


def record(number: int, *, tokens: int = 20, task: str = "other", time_seconds: float = 0.0) -> Record:
    return Record(
        tokens=tuple(range(number, number + tokens)),
        prompt_length=5,
        sampling=Sampling(max_tokens=tokens, seed=number, temperature=0.5, logit_bias=((3, 1.5),)),
        target="t",
        task=task,
        time_seconds=time_seconds,
        opening=f"{number:016x}",
    )
