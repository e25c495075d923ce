"""Faults and changes of workers on a cluster: signals to their processes, deletions, evictions and swapped drafts."""

from __future__ import annotations

import contextlib
import json
import os
import signal

from specdecode_worker.contract import Route
from support import processes
from support.e2e.endpoint import Endpoint
from support.kube import Manifest, wait_for

# The engine is the child process of the server with the weights in its memory.
_SIGNAL_ENGINE = """
import os
for name in filter(str.isdigit, os.listdir("/proc")):
    try:
        command = open(f"/proc/{name}/cmdline").read()
        pages = int(open(f"/proc/{name}/statm").read().split()[1])
    except OSError:
        continue
    if "spawn_main" in command and pages > 30000:
        os.kill(int(name), NUMBER)
        print("signalled", name)
"""


def signal_engine(endpoint: Endpoint, pod: str, number: int) -> None:
    code = _SIGNAL_ENGINE.replace("NUMBER", str(int(number)))
    assert "signalled" in endpoint.namespace.exec(pod, "python3", "-c", code)


def kill_pod(endpoint: Endpoint, pod: str) -> None:
    """Delete a pod without any grace period."""
    endpoint.namespace.kubectl("delete", "pod", pod, "--force", "--grace-period=0")


def evict(endpoint: Endpoint, pod: str) -> None:
    """Evict a pod through the Eviction API, which respects the PodDisruptionBudget."""
    namespace = endpoint.namespace
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod, "namespace": namespace.name}}
    path = f"/api/v1/namespaces/{namespace.name}/pods/{pod}/eviction"
    namespace.kubectl("create", "--raw", path, "--filename", "-", stdin=json.dumps(eviction))


def restarts(endpoint: Endpoint, pod: str) -> int:
    """Return how often the containers of a pod were restarted."""
    statuses = endpoint.namespace.get("pod", pod)["status"].get("containerStatuses", [])
    return sum(status["restartCount"] for status in statuses)


def wait_for_ready_pods(endpoint: Endpoint, count: int) -> None:
    wait_for(f"{count} workers are ready", lambda: len(endpoint.ready_pods()) == count, timeout_s=180, every_s=1)


def kill_server(pod: Manifest) -> None:
    """End all processes of a worker's container with SIGKILL, past the API server; the kubelet starts it again."""
    for pid in processes.of_pod(pod["metadata"]["uid"], "specdecode-worker"):
        with contextlib.suppress(ProcessLookupError):  # it ended with the one before
            os.kill(pid, signal.SIGKILL)


def swap_draft(endpoint: Endpoint, pod: str, **change: str) -> str | None:
    """Replace the draft of a worker through its admin port by one with the same files, and return its quantization."""
    with endpoint.admin(pod) as client:
        draft = client.get(Route.draft).raise_for_status().json()["draft"]
        body = {"uri": draft["uri"], "method": draft["method"], **change}
        client.put(Route.draft, json=body).raise_for_status()

        def swapped() -> dict[str, str | None]:
            state: dict[str, str | None] = client.get(Route.draft).raise_for_status().json()["draft"]
            assert (state["pending"], state["swap_problem"]) == (None, None), state
            return state

        return wait_for("the draft is swapped", swapped, timeout_s=120)["quantization"]
