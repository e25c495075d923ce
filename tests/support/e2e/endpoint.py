"""A SpecDecodeDeployment as seen by its user and through its workers' admin ports."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from specdecode_operator.plugin.drafts import change_for, offer
from specdecode_operator.state.learned import parse_state, plan_of
from specdecode_worker.contract import Plan, Port, Report, Route, StepTime, SyntheticKnobs
from support.e2e.kube import Namespace
from support.e2e.traffic import Traffic
from support.kube import KubectlError, Manifest, is_ready, wait_for
from support.processor import FASTEST_DTYPE, MULTIPLIES_BF16

CHILDREN = "deployments,replicasets,pods,services,configmaps,secrets,poddisruptionbudgets"

MODEL = "smollm2"
MEMORY = "4Gi" if MULTIPLIES_BF16 else "6Gi"
"""Memory limit of a worker, with room for a second copy of the weights: a test runs ``bench`` while the server runs."""
ONE_CORE = {"requests": {"cpu": "100m", "memory": "1Gi"}, "limits": {"cpu": "1", "memory": MEMORY}}
EQUAL_STEPS = SyntheticKnobs(step_time=(StepTime(seconds=0.12),))
"""Steps that take equally long with and without drafts, so that drafts gain time on every processor."""


def resource(name: str, speculation: Manifest, workers: Manifest | None = None) -> Manifest:
    """Return a custom resource with workers of one CPU core and one torch thread.

    The dtype is the fastest one, so that real steps stay below padded ones (SyntheticKnobs) on every processor. The
    test that compares texts switches it to float32.
    """
    return {
        "apiVersion": "specdecode.io/v1alpha1",
        "kind": "SpecDecodeDeployment",
        "metadata": {"name": name},
        "spec": {
            "model": {
                "uri": "embedded://smollm2-135m-instruct",
                "servedName": MODEL,
            },
            "speculation": speculation,
            "engine": {"dtype": FASTEST_DTYPE, "maxModelLen": 1024, "maxNumSeqs": 4, "kvCacheTokens": 4096},
            "workers": {
                "accelerator": {"count": 0},
                "resources": ONE_CORE,
                **(workers or {}),
            },
            "drain": {"endpointDelay": "1s", "gracePeriod": "10s"},
            "router": {"replicas": 0},
        },
    }


class Endpoint:
    """Access to the resource, its status, its pods and their admin ports."""

    def __init__(self, namespace: Namespace, name: str) -> None:
        self.namespace = namespace
        self.name = name
        self.labels = f"specdecode.io/name={name}"

    # Resource

    def get(self) -> Manifest:
        return self.namespace.get("sdd", self.name)

    def patch(self, spec: Manifest) -> None:
        """Merge ``spec`` into the resource's spec; null removes a field."""
        self.namespace.kubectl("patch", "sdd", self.name, "--type", "merge", "--patch", json.dumps({"spec": spec}))

    def status(self) -> Manifest:
        return self.get().get("status", {})  # type: ignore[no-any-return]

    def speculation(self) -> Manifest:
        return self.status().get("speculation", {})  # type: ignore[no-any-return]

    def depth(self) -> int:
        """Return the depth of the status, which has none before a worker reports that it runs the plan."""
        depth = self.speculation().get("depth")
        assert depth is not None, "the status has no depth"
        return int(depth)

    def draft_status(self) -> Manifest:
        return self.status().get("draft") or {}

    def running_drafts(self) -> set[str]:
        """Return the hashes of the drafts that the ready workers run."""
        return {self.report(pod).draft.hash for pod in self.ready_pods()}

    def command_draft(self, verb: str) -> None:
        """Promote, reject, roll back or distill as the kubectl plugin does."""
        change = change_for(verb, self.get(), self.drafts(), str(time.time_ns()))
        if change.spec is not None:
            self.patch(change.spec)
        else:
            self.set_role(change.draft, change.role)

    def drafts(self) -> list[Manifest]:
        """Return the SpecDecodeDrafts, those that ended last first."""
        drafts = [one for one in self.namespace.list("sddr") if one["spec"]["deploymentRef"]["name"] == self.name]
        return sorted(drafts, key=lambda one: one.get("status", {}).get("outcomeTime", ""), reverse=True)

    def ended_drafts(self) -> list[Manifest]:
        """Return the status of the drafts that ended or were promoted, the latest first."""
        return [one["status"] for one in self.drafts() if one.get("status", {}).get("outcome")]

    def offer_draft(self, uri: str, digest: str) -> None:
        """Offer a draft as the kubectl plugin does."""
        offered = offer(self.get(), self.drafts(), uri, digest)
        if isinstance(offered, str):
            self.set_role(offered, "Candidate")
        else:
            self.namespace.apply(offered)

    def set_role(self, draft: str, role: str) -> None:
        patch = json.dumps({"spec": {"role": role}})
        self.namespace.kubectl("patch", "sddr", draft, "--type", "merge", "--patch", patch)

    def trial_pod(self) -> str | None:
        """Return the pod that tries a draft."""
        trials = (one["status"].get("trial", {}) for one in self.drafts() if "status" in one)
        return next((trial["pod"] for trial in trials if trial.get("pod")), None)

    def condition(self, kind: str) -> Manifest:
        """Return the condition of this type, or a placeholder with status 'absent'."""
        conditions = {condition["type"]: condition for condition in self.status().get("conditions", [])}
        return conditions.get(kind, {"status": "absent", "reason": "", "message": ""})

    def wait_ready(self, timeout_s: float = 180) -> None:
        self.wait_condition("Ready", "True", timeout_s)

    def wait_condition(self, kind: str, status: str, timeout_s: float = 60) -> Manifest:
        """Wait until the condition of this type has the status, and return it.

        Conditions that follow from the workers' reports can come a scrape later than Ready does.
        """

        def reached() -> Manifest:
            condition = self.condition(kind)
            assert condition["status"] == status, condition
            return condition

        return wait_for(f"{kind} of {self.name} is {status}", reached, timeout_s=timeout_s, every_s=1)

    def description(self) -> str:
        """Return a description of the resource for the report of a failed test."""
        try:
            return self.namespace.kubectl("describe", "sdd", self.name)
        except KubectlError as error:
            return str(error)

    def persisted_state(self) -> str:
        """Return the operator's persisted state for the report of a failed test."""
        try:
            state = self.state()
        except KubectlError as error:
            return str(error)
        return json.dumps({key: value for key, value in state.items() if key not in ("plan", "template")})

    def children(self) -> list[str]:
        items = self.namespace.list(CHILDREN, self.labels)
        return [f"{item['kind']}/{item['metadata']['name']}" for item in items]

    def delete(self, timeout_s: int = 60) -> None:
        """Delete the resource, and wait until nothing of it is left."""
        assert self.children()
        self.namespace.kubectl("delete", "sdd", self.name, f"--timeout={timeout_s}s")
        assert "not found" in self.namespace.refusal("get", "sdd", self.name)

        def nothing_left() -> bool:
            assert self.children() == []
            return True

        wait_for("nothing is left", nothing_left, timeout_s=60)

    @contextmanager
    def traffic(self, concurrency: int, **fields: Any) -> Iterator[Traffic]:
        """Yield clients of its Service, which ask while the block runs. No request of theirs may fail."""
        with (
            self.namespace.reach("service", self.name, 80) as url,
            Traffic(url, MODEL, concurrency=concurrency, **fields) as clients,
        ):
            yield clients
        assert clients.failures == []

    # Pods

    def pods(self, role: str = "worker") -> list[Manifest]:
        """Return the pods of a role that are not terminating."""
        pods = self.namespace.list("pods", f"{self.labels},specdecode.io/role={role}")
        return [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]

    def all_pods(self) -> set[str]:
        """Return the names of all pods, including terminating ones."""
        pods = self.namespace.list("pods", f"{self.labels},specdecode.io/role=worker")
        return {pod["metadata"]["name"] for pod in pods}

    def ready_pods(self, role: str = "worker") -> list[str]:
        return [pod["metadata"]["name"] for pod in self.pods(role) if is_ready(pod)]

    def identities(self) -> set[tuple[str, int]]:
        """Return the uid and restart count of every pod.

        An unchanged result means that no pod was replaced or restarted.
        """
        return {
            (pod["metadata"]["uid"], sum(c["restartCount"] for c in pod["status"].get("containerStatuses", [])))
            for pod in self.pods()
        }

    def one_pod(self) -> str:
        (pod,) = self.ready_pods()
        return pod

    # Admin port

    @contextmanager
    def admin(self, pod: str | None = None) -> Iterator[httpx.Client]:
        with self.namespace.reach("pod", pod or self.one_pod(), Port.admin) as url:
            headers = {"Authorization": f"Bearer {self._token()}"}
            with httpx.Client(base_url=url, headers=headers, trust_env=False, timeout=20) as client:
                yield client

    def report(self, pod: str | None = None) -> Report:
        with self.admin(pod) as client:
            return Report.model_validate_json(client.get(Route.report).raise_for_status().content)

    def plan(self, pod: str | None = None) -> Plan:
        with self.admin(pod) as client:
            return Plan.model_validate_json(client.get(Route.plan).raise_for_status().content)

    def set_knobs(self, knobs: SyntheticKnobs | None, pod: str | None = None) -> None:
        """Set the synthetic knobs of every worker, or of ``pod`` only. None removes them."""
        for name in [pod] if pod else self.ready_pods():
            with self.admin(name) as client:
                if knobs is None:
                    client.delete(Route.synthetic).raise_for_status()
                else:
                    client.put(Route.synthetic, content=knobs.model_dump_json()).raise_for_status()

    def state(self) -> Any:
        """Return the state that the operator persisted for this deployment, as a document."""
        config_map = self.namespace.get("configmap", f"{self.name}-state")
        uid = config_map["metadata"]["ownerReferences"][0]["uid"]
        plan = plan_of(self.namespace.get("configmap", f"{self.name}-plan")["data"], uid)
        learned = parse_state(config_map["data"], uid, plan)
        assert learned is not None, f"{self.name}-state cannot be read"
        return {**learned.model_dump(mode="json"), "plan": plan.model_dump(mode="json") if plan else None}

    def _token(self) -> str:
        """Return the current token of the scope operator."""
        data = self.namespace.get("secret", f"{self.name}-tokens")["data"]
        return base64.b64decode(data["operator"]).decode().split()[0]
