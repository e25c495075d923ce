"""Plans and requests of the lossless tests."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specdecode_worker.contract import Plan, PlanRow, TaskMatch, TreeShape
from specdecode_worker.core.messages import Submit
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
