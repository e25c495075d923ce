"""Training runs of a deployment on the cluster, and the different prompts that they collect."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from specdecode_operator.manifests import RUN_LABEL
from specdecode_worker.capture import opening_hash
from specdecode_worker.contract.distillation import JOB_CONTAINER
from specdecode_worker.training import prompts
from specdecode_worker.training.distillation.records import split_of
from support.e2e.draft_files import GOOD_URI
from support.e2e.endpoint import MODEL, Endpoint
from support.e2e.kube import Namespace
from support.e2e.loop import deployed
from support.e2e.traffic import Traffic
from support.kube import Manifest, wait_for

_LONGEST = 300
_THINGS = (
    *("fruits", "cities", "planets", "tools", "animals", "languages", "metals", "rivers", "sports", "trees"),
    *("instruments", "spices", "dances", "birds", "vegetables", "oceans", "mountains", "games", "cheeses", "flowers"),
)
_COLUMNS = ("colour", "price", "size", "country", "weight", "age", "use", "season", "origin", "rank", "speed", "taste")


def different_questions(splits: Mapping[str, int]) -> list[str]:
    """Return questions of the training prompts, as many of each split as ``splits`` says, in random order."""
    return _spread(splits, lambda rng: prompts.draw(rng).text, "questions")


def different_tables(splits: Mapping[str, int], seed: str = "tables") -> list[str]:
    """Return requests for Markdown tables, as many of each split as ``splits`` says, in random order."""
    return _spread(splits, _table, seed)


def _table(rng: random.Random) -> str:
    first, second = rng.sample(_COLUMNS, 2)
    things = f"{rng.randint(4, 9)} {rng.choice(_THINGS)}"
    return f"Write a Markdown table of {things} with the columns name, {first} and {second}. Write only the table."


def _spread(splits: Mapping[str, int], draw: Callable[[random.Random], str], seed: str) -> list[str]:
    rng, left, chosen = random.Random(seed), Counter(splits), set[str]()
    while left.total() > 0:
        text = draw(rng)
        split = split_of(opening_hash(text))
        if text not in chosen and left[split] > 0 and len(text) < _LONGEST:
            left[split] -= 1
            chosen.add(text)
    texts = sorted(chosen)
    rng.shuffle(texts)
    return texts


def askers(url: str, clients: int, questions: Sequence[str]) -> Traffic:
    """Return clients that ask different questions with short answers and permit the capture of them.

    They repeat the questions, with other answers, when all were asked.
    """
    permission = {"X-Specdecode-Capture": "on"}
    return Traffic(
        url,
        MODEL,
        concurrency=clients,
        max_tokens=24,
        prompts=questions,
        timeout_s=120,
        temperature=0.8,
        headers=permission,
    )


SPLITS = {"train": 12, "validation": 4, "test": 4}
"""Questions by split: too few for a verdict, so that a run ends with NotBetter."""
RUN_SECONDS = 300


@contextmanager
def trained(
    namespace: Namespace, name: str, claim: str, draft: str = GOOD_URI, workers: Manifest | None = None
) -> Iterator[Endpoint]:
    """Deploy one worker whose runs take seconds."""
    distillation = {
        "capture": {"percent": 100, "consent": "OptIn", "maxAge": "2h"},
        "trigger": {"minConversations": sum(SPLITS.values()), "cooldown": "1s"},
        "steps": 4,
        "timeLimit": "10m",
        "jobTemplate": job_template("6Gi"),
        "storage": {"uri": f"pvc://{claim}"},
    }
    speculation = {"mode": "Static", "draft": {"uri": draft}}
    with deployed(namespace, name, speculation, workers or {}, replicas=1, distillation=distillation) as endpoint:
        yield endpoint


def begin(endpoint: Endpoint, state: str | None = "Running") -> str:
    """Begin a run and return its name once its Job has the state."""
    endpoint.command_draft("distill")
    run = wait_for_run(endpoint, "Collecting", "Distilling")
    with endpoint.namespace.reach("service", endpoint.name, 80) as url, askers(url, 2, different_questions(SPLITS)):
        wait_for("the Job is created", lambda: jobs(endpoint), timeout_s=120)
    if state is not None:
        wait_for_state(endpoint, state)
    return run


def wait_for_run(endpoint: Endpoint, *phases: str) -> str:
    """Wait until the phase is one of these and return the name of the run."""
    wait_for(f"phase {phases}", lambda: endpoint.draft_status().get("phase") in phases, timeout_s=60)
    return str(endpoint.draft_status()["run"]["id"])


def wait_for_state(endpoint: Endpoint, state: str, timeout_s: float = 90) -> Manifest:
    """Wait until the Job has the state, and return the run's status."""

    def reached() -> Manifest:
        run: Manifest = endpoint.draft_status().get("run") or {}
        assert run.get("jobState") == state, f"{run}"
        return run

    return wait_for(f"the Job is {state}", reached, timeout_s=timeout_s)


def wait_for_end(endpoint: Endpoint, run: str) -> Manifest:
    def ended() -> Manifest | None:
        last = endpoint.draft_status().get("lastRun") or {}
        assert last.get("id") == run, f"{endpoint.draft_status()}"
        return last

    return wait_for(f"run {run} has ended", ended, timeout_s=RUN_SECONDS, every_s=1)


def wait_until_idle(endpoint: Endpoint) -> None:
    """Wait until neither a run nor a trial is under way."""
    wait_for("no run is under way", lambda: endpoint.draft_status().get("phase") in (None, "Serving"), timeout_s=60)


def jobs(endpoint: Endpoint) -> list[Manifest]:
    """Return the Jobs that train. Others delete the folder of a run."""
    listed = endpoint.namespace.list("jobs", endpoint.labels)
    return [one for one in listed if not one["metadata"]["labels"][RUN_LABEL].endswith("-delete")]


def job(endpoint: Endpoint) -> Manifest:
    """Return the only Job that trains."""
    (only,) = jobs(endpoint)
    return only


def pods_of_jobs(endpoint: Endpoint) -> list[Manifest]:
    """Return the pods of Jobs that have not ended."""
    pods = endpoint.namespace.list("pods", f"{endpoint.labels},specdecode.io/role=job")
    return [pod for pod in pods if pod["status"]["phase"] in ("Pending", "Running")]


def job_template(memory: str, **pod: Any) -> Manifest:
    """Return the template of the Job with a limit of memory, and with more fields of its pod."""
    resources = {"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"cpu": "1", "memory": memory}}
    return {"spec": {**pod, "containers": [{"name": JOB_CONTAINER, "resources": resources}]}}
