"""Helpers for the control loop tests: small workers, padded steps and the depth of plan rows.

A worker has half a core and one thread. Every step is padded beyond its real duration there, so that replicas do not
slow each other down on a machine with two cores.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from specdecode_worker.contract import OTHER_TASK, Env, StepTime, SyntheticKnobs, TreeShape
from support.e2e.endpoint import Endpoint, resource
from support.e2e.kube import Namespace
from support.kube import Manifest, wait_for

PROOF = pytest.mark.proof("loop")
SETTLED_SECONDS = 240
HALF_A_CORE = {"requests": {"cpu": "100m", "memory": "1Gi"}, "limits": {"cpu": "500m", "memory": "4Gi"}}
PLAIN_SECONDS = 0.3
MAX_DEPTH = 4
SPECULATION: Manifest = {
    "draft": {"uri": "embedded://smollm2-135m-instruct-eagle3"},
    "depth": {"min": 0, "max": MAX_DEPTH, "initial": 3},
    "stability": "Low",
}


def decision(endpoint: Endpoint, concurrency: int, depth: int) -> Manifest:
    """Return the newest entry of the status history in which the row of this concurrency came to ``depth``."""
    after = f"chain:{depth}" if depth else "none"

    def find_entry() -> Manifest | None:
        ours = (e for e in endpoint.speculation()["history"] if names_load(e, concurrency))
        return next((entry for entry in ours if entry["after"] == after), None)

    history_entry = wait_for(f"status history names {after}", find_entry, timeout_s=30)
    assert history_entry
    return history_entry


def assert_explained(endpoint: Endpoint, why: Manifest) -> None:
    """Assert that a decision names its measurements and was published as an Event."""
    assert "acceptance by depth" in why["reason"], why
    assert " ms" in why["reason"], why
    events = [e["message"] for e in endpoint.namespace.list("events") if e["involvedObject"]["name"] == endpoint.name]
    assert any(why["reason"] in message for message in events), events


@contextmanager
def deployed(
    namespace: Namespace,
    name: str,
    speculation: Manifest,
    workers: Manifest,
    *,
    knobs: SyntheticKnobs | None = None,
    **spec: Any,
) -> Iterator[Endpoint]:
    """Deploy an endpoint for the duration of the block and wait until it is Ready.

    Its workers start with ``knobs``, so that the steps that they time before they serve are padded too.
    """
    template = with_knobs(knobs) if knobs is not None else {}
    made = resource(name, {**SPECULATION, **speculation}, {"resources": HALF_A_CORE, "template": template, **workers})
    made["spec"]["engine"].update(spec.pop("engine", {}))
    made["spec"].update(spec)
    namespace.apply(made)
    endpoint = Endpoint(namespace, name)
    try:
        endpoint.wait_ready()
        yield endpoint
    finally:
        namespace.kubectl("delete", "sdd", name, "--ignore-not-found", "--timeout=30s")
        if drafts := [one["metadata"]["name"] for one in endpoint.drafts()]:
            namespace.kubectl("delete", "sddr", *drafts)
        wait_for("its pods are gone", lambda: not endpoint.all_pods(), timeout_s=60)


def with_knobs(knobs: SyntheticKnobs) -> Manifest:
    """Return a pod template for workers that start with ``knobs``."""
    environment = [{"name": Env.synthetic, "value": knobs.model_dump_json(exclude_none=True)}]
    return {"spec": {"containers": [{"name": "worker", "env": environment}]}}


def steps(*, node_seconds: float, sequences: int = 1 << 30) -> tuple[StepTime, ...]:
    """Return step times for up to ``sequences`` sequences.

    Every node adds ``node_seconds`` to a plain step, up to the largest tree.
    """
    seconds = [PLAIN_SECONDS + node_seconds * nodes for nodes in range(MAX_DEPTH + 1)]
    by_nodes = [StepTime(max_sequences=sequences, max_nodes=nodes, seconds=s) for nodes, s in enumerate(seconds)]
    return (*by_nodes, StepTime(max_sequences=sequences, seconds=seconds[-1]))


def knobs(*rows: Sequence[StepTime], **acceptance: Any) -> SyntheticKnobs:
    return SyntheticKnobs(step_time=tuple(row for table in rows for row in table), **acceptance)


def planned_shape(endpoint: Endpoint, concurrency: int, task: str = OTHER_TASK, pod: str | None = None) -> TreeShape:
    """Return the planned shape of the task at this concurrency, in short contexts, by the plan of the worker."""
    plan = endpoint.plan(pod or endpoint.ready_pods()[0])
    bucket = sum(concurrency > edge for edge in plan.buckets.concurrency)
    return plan.shape(bucket, 0, task)


def planned_depth(endpoint: Endpoint, concurrency: int, task: str = OTHER_TASK) -> int:
    return planned_shape(endpoint, concurrency, task).depth


def names_load(entry: Manifest, concurrency: int | str) -> bool:
    """Return whether an entry of the history was decided for this concurrency, alone or together with others.

    Loads above the last bound of the plan have a name such as ">2".
    """
    name = re.escape(str(concurrency))
    return re.match(rf"concurrency ([^,]+ or )?{name}( or [^,]+)?,", entry["load"]) is not None


def wait_for_row(endpoint: Endpoint, what: str, concurrency: int, depths: Sequence[int], task: str = OTHER_TASK) -> int:
    def read_row() -> list[int]:
        depth = planned_depth(endpoint, concurrency, task)
        assert depth in depths, f"depth {depth}"
        return [depth]

    return wait_for(what, read_row, timeout_s=SETTLED_SECONDS, every_s=2)[0]
