"""Requests, and an engine over a Llama of two tiny layers with a noised copy of it as the draft."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import torch

from specdecode_worker.contract import Plan, PlanRow, TaskMatch, TreeShape
from specdecode_worker.core.messages import Submit, Tokens
from specdecode_worker.core.request import Request
from specdecode_worker.engine.engine import Engine
from specdecode_worker.sampling.params import Sampling
from support import small_llama
from support.small_llama import engine_of
from support.worker.accounts import check_engine

CPU = torch.device("cpu")


@lru_cache
def networks(dtype: torch.dtype = torch.float64) -> small_llama.Networks:
    torch.set_num_threads(1)
    return small_llama.networks(dtype)


def small_engine(
    *,
    dtype: torch.dtype = torch.float64,
    blocks: int = 80,
    budget: int = 128,
    max_model_len: int = 200,
    eos: tuple[int, ...] = (),
    **options: Any,
) -> Engine:
    """Return an engine with these limits and the other options of ``engine_of``."""
    return engine_of(
        networks(dtype), blocks=blocks, budget=budget, max_model_len=max_model_len, eos_token_ids=eos, **options
    )


def plan_of(*shapes: str, **fields: Any) -> Plan:
    """Return a plan with the first shape for ``other`` and the next ones for t1, t2, ..., at any load."""
    names = ["other", *(f"t{i}" for i in range(1, len(shapes)))]
    rows = tuple(
        PlanRow(concurrency=bucket, context=0, task=name, shape=TreeShape.parse(shape))
        for bucket in range(6)
        for name, shape in zip(names, shapes, strict=True)
    )
    tasks = tuple(TaskMatch(name=name) for name in names[1:])
    return Plan(**{"draft": "d", "version": 1, "rows": rows, "tasks": tasks, "explore": 0, "guard": False, **fields})


def submit(
    name: str = "r", prompt: Sequence[int] = (1, 2, 3), *, task: str = "other", cache_salt: str = "", **sampling: Any
) -> Submit:
    wanted = Sampling(**{"max_tokens": 20, "seed": 1, "temperature": 0.0, **sampling})
    return Submit(
        request_id=name, prompt=tuple(prompt), sampling=wanted, task=task, arrival_seconds=5.0, cache_salt=cache_salt
    )


def request(name: str = "r", prompt: Sequence[int] = (1, 2, 3), **sampling: Any) -> Request:
    return Request.of(submit(name, prompt, **sampling), (), arrived_seconds=5.0)


def drain(engine: Engine, most: int = 2000) -> list[Tokens]:
    """Run steps until the engine is idle and return everything that it emitted."""
    outputs: list[Tokens] = []
    while not engine.idle:
        assert most > 0, "the engine does not come to an end"
        most -= 1
        outputs += engine.step()
    check_engine(engine)
    return outputs


def texts(outputs: Iterable[Tokens]) -> dict[str, list[int]]:
    by_request: dict[str, list[int]] = {}
    for new in outputs:
        by_request.setdefault(new.request_id, []).extend(new.tokens)
    return by_request
