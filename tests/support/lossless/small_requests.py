"""Plans and requests of the lossless tests, and the texts that an engine gives them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specdecode_worker.contract import Plan, PlanRow, TaskMatch, TreeShape
from specdecode_worker.core.messages import Submit
from specdecode_worker.engine.engine import Engine
from specdecode_worker.sampling.params import Sampling
from support.small_llama import VOCABULARY


def plan_of(shapes: Sequence[TreeShape], **fields: object) -> Plan:
    """Return a plan in which task ``t<i>`` runs the i-th shape at any load."""
    rows = tuple(
        PlanRow(concurrency=bucket, context=0, task=f"t{i}", shape=shape)
        for bucket in range(6)
        for i, shape in enumerate(shapes)
    )
    tasks = tuple(TaskMatch(name=f"t{i}") for i in range(len(shapes)))
    defaults = {"draft": "d", "version": 1, "rows": rows, "tasks": tasks, "explore": 0, "guard": False}
    return Plan.model_validate(defaults | fields)


def submit(index: int, *, sampled: bool, tokens: int, shapes: int = 1) -> Submit:
    """Return request ``index``: a prompt, a seed and, if sampled, its own sampling parameters."""
    generator = torch.Generator().manual_seed(index)
    prompt = torch.randint(0, VOCABULARY, (1 + 7 * index % 40,), generator=generator).tolist()
    params = ((1.0, 1.0, 0), (0.7, 0.9, 0), (1.3, 1.0, 5), (0.9, 0.95, 20))[index % 4] if sampled else (0.0, 1.0, 0)
    sampling = Sampling(max_tokens=tokens, seed=1000 + index, temperature=params[0], top_p=params[1], top_k=params[2])
    return Submit(request_id=str(index), prompt=tuple(prompt), sampling=sampling, task=f"t{index % shapes}")


def texts(engine: Engine, requests: Sequence[Submit], *, together: bool = True) -> dict[str, list[int]]:
    """Return the tokens of all requests, and check that the engine's accounting balances once it is idle.

    Only requests with stop tokens may end before their length.
    """
    tokens_by_request: dict[str, list[int]] = {request.request_id: [] for request in requests}
    stoppable = {request.request_id for request in requests if request.sampling.stop_token_ids}
    for group in [list(requests)] if together else [[request] for request in requests]:
        for request in group:
            engine.add(request)
        while not engine.idle:
            for new in engine.step():
                tokens_by_request[new.request_id] += new.tokens
                assert new.finish in (None, "length") or (new.finish == "stop" and new.request_id in stoppable)
    engine.check()
    return tokens_by_request
