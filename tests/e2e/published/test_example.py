"""The GPU example on a bare cluster: applied as it is, with a stand-in accelerator and a hub of the listed layout.

The hub asks for a token for the target, which is in shards, and has a pickled head. What is patched is said here: the
address of the hub, amounts that this machine has, and at last the CPU in place of the accelerator that is none.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from support.cluster_faults.node_resource import node_resource
from support.e2e.endpoint import ONE_CORE, Endpoint
from support.e2e.hubs import PORT, hub_in_pod
from support.e2e.kube import Namespace
from support.kube import ROOT, Cluster, Manifest, wait_for

pytestmark = [pytest.mark.timeout(900), pytest.mark.proof("examples")]
EXAMPLE = ROOT / "examples" / "llama-3.1-8b.yaml"
NAME, MODEL, HUB = "llama-3-1-8b", "meta-llama/Llama-3.1-8B-Instruct", "published-hub"
TOKEN = "hf_of-an-account-that-accepted"


@pytest.fixture
def accelerator(cluster: Cluster) -> Iterator[None]:
    with node_resource(cluster, "nvidia.com/gpu", 1):
        yield


@pytest.fixture
def hub(watched: Namespace) -> Iterator[None]:
    """Run the hub, with the Secret that the header of the example asks for."""
    with hub_in_pod(watched, HUB):
        watched.kubectl("create", "secret", "generic", "hub-token", f"--from-literal=token={TOKEN}")
        yield
        watched.kubectl("delete", "secret", "hub-token")


def patches() -> Manifest:
    """Return what differs from the example on this machine: the hub, and amounts of memory, cores and KV cache."""
    env = [{"name": "HF_ENDPOINT", "value": f"http://{HUB}:{PORT}"}]
    template = {"spec": {"initContainers": [{"name": "pull", "env": env}]}}
    return {"workers": {"resources": ONE_CORE, "template": template}, "engine": {"kvCacheTokens": 32768}}


@pytest.fixture
def applied(watched: Namespace, hub: None, accelerator: None) -> Iterator[Endpoint]:
    watched.kubectl("apply", "-f", str(EXAMPLE))
    endpoint = Endpoint(watched, NAME)
    endpoint.patch(patches())
    yield endpoint
    watched.kubectl("delete", "-f", str(EXAMPLE), "--timeout=60s")


def test_the_example_is_scheduled_pulled_and_served(watched: Namespace, applied: Endpoint) -> None:
    def pulled() -> Any:
        for pod in applied.pods():
            for status in pod["status"].get("initContainerStatuses", []):
                if "terminated" in status["state"]:
                    return pod["metadata"]["name"], status["state"]["terminated"]
        return None

    pod, ended = wait_for("a pod is scheduled on the accelerator and has pulled", pulled, timeout_s=300, every_s=2)
    assert ended["exitCode"] == 0, watched.kubectl("logs", pod, "--container", "pull")
    log = watched.kubectl("logs", pod, "--container", "pull")
    assert "EAGLE3-LLaMA3.1-Instruct-8B is in" in log, log

    # The accelerator is a number on the node, so the worker says that torch sees no GPU. Serve the same on the CPU.
    applied.patch({"workers": {"accelerator": {"count": 0}}})
    applied.wait_ready(timeout_s=400)
    pod = applied.one_pod()
    report = applied.report(pod)
    assert (report.draft.method, report.draft.problem) == ("eagle3", None)
    with watched.reach("service", NAME, 80) as url:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 40, "ignore_eos": True}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60, trust_env=False)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 40
    assert applied.report(pod).drafts > 0, "it speculates with the head that was published as a pickle"


@pytest.fixture
def cache(local_cluster: Cluster, tmp_path: Path) -> Path:
    """Make a folder of the node that is writable for the pods' user."""
    for folder in (tmp_path.parent, tmp_path.parent.parent):
        folder.chmod(0o755)
    tmp_path.chmod(0o777)
    return tmp_path


@pytest.fixture
def prefetched(watched: Namespace, hub: None, cache: Path) -> Iterator[Endpoint]:
    """Apply a deployment whose workers fit on no node yet, and whose models are wanted on nodes with a label."""
    example = yaml.safe_load(EXAMPLE.read_text())
    spec = {
        "model": example["spec"]["model"],
        "speculation": {"method": "ngram"},
        "modelCache": {"hostPath": {"path": str(cache)}},
        "prefetchNodeSelector": {"models": "llama"},
        "scaling": {"owner": "External", "minReplicas": 1},
        **patches(),
    }
    spec["workers"]["accelerator"] = {"count": 0}
    spec["workers"]["template"]["spec"]["nodeSelector"] = {"workers": "llama"}
    watched.apply({**example, "metadata": {"name": "prefetched"}, "spec": spec})
    yield Endpoint(watched, "prefetched")
    watched.cluster.kubectl("label", "nodes", "--all", "models-", "workers-")
    watched.kubectl("delete", "sdd", "prefetched", "--timeout=60s")


def test_a_prefetched_model_is_served_without_the_hub(watched: Namespace, prefetched: Endpoint, cache: Path) -> None:
    def counts() -> Manifest:
        return watched.get("daemonset", "prefetched-prefetch")["status"]

    wait_for("the DaemonSet is there", lambda: counts()["desiredNumberScheduled"] == 0, timeout_s=60)
    assert not list(cache.iterdir()), "no node has the label"
    watched.cluster.kubectl("label", "nodes", "--all", "models=llama")
    wait_for("the node is filled", lambda: counts().get("numberReady") == 1, timeout_s=120, every_s=2)
    watched.kubectl("delete", "pod", HUB, "--grace-period=1")
    watched.cluster.kubectl("label", "nodes", "--all", "workers=llama")
    prefetched.wait_ready(timeout_s=200)
    with watched.reach("service", "prefetched", 80) as url:
        body = {"model": MODEL, "prompt": "hi", "max_tokens": 4}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60, trust_env=False)
    assert answer.status_code == 200, answer.text
    prefetched.patch({"prefetchNodeSelector": None})
    wait_for("the DaemonSet is gone", lambda: not watched.list("daemonset"), timeout_s=60)
