"""The operator's I/O against a real API server: errors, watches, children, a status; and the API server cut off."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from fleet import DEFAULTS, SPEC, deep, deployment_with
from kube import Cluster as Kubectl
from kube import KubectlError, wait_for

from specdecode_operator import manifests
from specdecode_operator.api import crd
from specdecode_operator.api.v1alpha1 import GROUP, KIND, PLURAL, VERSION
from specdecode_operator.controller.observation import deployment_of, observe
from specdecode_operator.controller.reconciler import Reconciler
from specdecode_operator.errors import Conflict, Refused, Unavailable
from specdecode_operator.kube.client import CONFIG_MAPS, SECRETS, WORKLOADS, KubeClient
from specdecode_operator.state.store import StateStore
from specdecode_operator.telemetry.worker_client import WorkerClient
from specdecode_worker.contract import CheckVerdict, MemoryState

pytestmark = pytest.mark.cluster
MOST_MEMORY_MIB = 120


@pytest.fixture(scope="module")
def kind_is_known(cluster: Kubectl) -> None:
    try:
        cluster.get("crd", f"{PLURAL}.{GROUP}")
    except KubectlError:
        cluster.apply(yaml.safe_load(crd.text()))
    wait_for("our kind is served", lambda: cluster.kubectl("get", PLURAL, "--all-namespaces") is not None)


@pytest.fixture
async def api(cluster: Kubectl) -> AsyncIterator[KubeClient]:
    connection = await KubeClient.connect(cluster.kubeconfig)
    yield connection
    await connection.close()


def config_map(namespace: str, name: str, **data: str) -> dict[str, Any]:
    labels = {f"{GROUP}/role": "worker", f"{GROUP}/name": "x"}
    metadata = {"name": name, "namespace": namespace, "labels": labels}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}


def resource(name: str, **spec: Any) -> dict[str, Any]:
    """Replicas 0: everything is made but pods."""
    return {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": KIND,
        "metadata": {"name": name},
        "spec": json.loads(json.dumps(deep({**SPEC, "replicas": 0}, spec))),
    }


def methods_of(api: KubeClient, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Fills with the methods of all requests from now on."""
    calls: list[str] = []
    send = api._client.request

    async def counted(method: str, path: str, **params: Any) -> Any:
        calls.append(method)
        return await send(method, path, **params)

    monkeypatch.setattr(api._client, "request", counted)
    return calls


async def test_errors_are_told_apart(api: KubeClient, namespace: str) -> None:
    assert await api.get(CONFIG_MAPS, namespace, "absent") is None
    await api.create(CONFIG_MAPS, config_map(namespace, "once"))
    with pytest.raises(Conflict):
        await api.create(CONFIG_MAPS, config_map(namespace, "once"))
    with pytest.raises(Refused, match="lowercase RFC 1123"):
        await api.create(CONFIG_MAPS, config_map(namespace, "Not A Name"))


async def test_apply_owns_fields_and_mends_what_was_deleted(api: KubeClient, namespace: str, cluster: Kubectl) -> None:
    await api.apply(config_map(namespace, "applied", a="1", b="2"))
    await api.apply(config_map(namespace, "applied", a="3"))
    found = await api.get(CONFIG_MAPS, namespace, "applied")
    assert found is not None
    assert found["data"] == {"a": "3"}, "what is no longer applied goes"
    cluster.kubectl("delete", "configmap", "applied", namespace=namespace)
    await api.apply(config_map(namespace, "applied", a="3"))
    assert await api.get(CONFIG_MAPS, namespace, "applied") is None, "the same text is not sent twice in a minute"
    api.forget(namespace, "applied")
    await api.apply(config_map(namespace, "applied", a="3"))
    assert await api.get(CONFIG_MAPS, namespace, "applied") is not None


async def test_what_stands_is_not_applied_again_and_what_was_touched_is(
    api: KubeClient, namespace: str, cluster: Kubectl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specdecode_operator.kube.client.REAPPLY_SECONDS", 0)
    calls = methods_of(api, monkeypatch)
    for _ in range(3):
        await api.apply(config_map(namespace, "touched", a="1"))
    assert calls == ["patch", "get", "get"], "at rest nothing is written, not even the same again"
    metadata = cluster.get("configmap", "touched", namespace)["metadata"]
    cluster.kubectl("label", "configmap", "touched", "theirs=yes", namespace=namespace)
    await api.apply(config_map(namespace, "touched", a="1"))
    assert calls[3:] == ["get"], "fields of others are theirs"
    cluster.kubectl("patch", "configmap", "touched", "-p", '{"data":{"a":"2"}}', namespace=namespace)
    await api.apply(config_map(namespace, "touched", a="1"))
    assert calls[4:] == ["get", "patch"]
    found = cluster.get("configmap", "touched", namespace)
    assert (found["data"], found["metadata"]["uid"]) == ({"a": "1"}, metadata["uid"])
    cluster.kubectl("delete", "configmap", "touched", namespace=namespace)
    await api.apply(config_map(namespace, "touched", a="1"))
    assert cluster.get("configmap", "touched", namespace)["data"] == {"a": "1"}


async def test_the_next_operator_applies_nothing_that_stands(
    api: KubeClient, namespace: str, cluster: Kubectl, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("stands", "touched", "other-text"):
        await api.apply(config_map(namespace, name, a="1"))
    told = api.applied.told(namespace, ["stands", "touched", "other-text"])
    cluster.kubectl("patch", "configmap", "touched", "-p", '{"data":{"a":"2"}}', namespace=namespace)
    restarted = await KubeClient.connect(cluster.kubeconfig)
    restarted.applied.recall(namespace, told)
    calls = methods_of(restarted, monkeypatch)
    await restarted.apply(config_map(namespace, "stands", a="1"))
    assert calls == ["get"]
    await restarted.apply(config_map(namespace, "touched", a="1"))
    assert calls[1:] == ["get", "patch"], "somebody took a field while no operator looked"
    await restarted.apply(config_map(namespace, "other-text", a="3"))
    assert calls[3:] == ["patch"], "this operator wants something else"
    await restarted.close()


async def test_watch_tells_what_happens(api: KubeClient, namespace: str) -> None:
    version = (await api.list(CONFIG_MAPS, namespace, labels=f"{GROUP}/role=worker"))["metadata"]["resourceVersion"]
    seen: list[tuple[str, str]] = []

    async def watch() -> None:
        stream = api.watch(CONFIG_MAPS, namespace, labels=f"{GROUP}/role=worker", version=version)
        async for event, found in stream:
            seen.append((event, found["metadata"]["name"]))
            if len(seen) == 2:
                return

    task = asyncio.create_task(watch())
    await api.apply(config_map(namespace, "seen", a="x" * 200_000))
    await api.apply(config_map(namespace, "seen", a="2"))
    await asyncio.wait_for(task, 10)
    assert seen == [("ADDED", "seen"), ("MODIFIED", "seen")]


async def test_an_api_server_that_is_not_there(api: KubeClient) -> None:
    api._api.configuration.host = "https://127.0.0.1:9"
    with pytest.raises(Unavailable):
        await api.get(CONFIG_MAPS, "default", "any")


async def test_a_key_becomes_children_and_a_status(
    api: KubeClient, namespace: str, cluster: Kubectl, kind_is_known: None
) -> None:
    cluster.apply(resource("made"), namespace=namespace)
    reconciler = Reconciler(api, WorkerClient(), StateStore(api), DEFAULTS, poll_seconds=5)
    assert await reconciler.handle((namespace, "made")) == 5
    token = (await api.get(SECRETS, namespace, "made-admin") or {})["data"]
    found = cluster.get("sdd", "made", namespace)
    assert "finalizers" not in found["metadata"]
    assert found["status"]["observedGeneration"] == 1
    written = found["metadata"]["resourceVersion"]
    await reconciler.handle((namespace, "made"))
    await reconciler.handle((namespace, "made"))
    again = cluster.get("sdd", "made", namespace)
    assert again["status"]["url"] == f"http://made.{namespace}.svc/v1"
    settled = again["metadata"]["resourceVersion"]
    await reconciler.handle((namespace, "made"))
    assert cluster.get("sdd", "made", namespace)["metadata"]["resourceVersion"] == settled, (
        f"status is written though nothing changed (first {written})"
    )
    assert (await api.get(SECRETS, namespace, "made-admin") or {})["data"] == token, "a token is made once"
    cluster.kubectl("delete", "sdd", "made", "--wait=true", "--timeout=20s", namespace=namespace)
    assert await reconciler.handle((namespace, "made")) is None
    wait_for(
        "children are collected", lambda: not cluster.list("deploy,cm,svc,secret,pdb", f"{GROUP}/name=made", namespace)
    )


async def test_a_namesake_waits_for_the_old_token_to_go(
    api: KubeClient, namespace: str, cluster: Kubectl, kind_is_known: None
) -> None:
    """Pods that start with a token which is then collected could never be reached again."""
    cluster.apply(resource("twin"), namespace=namespace)
    reconciler = Reconciler(api, WorkerClient(), StateStore(api), DEFAULTS, poll_seconds=5)
    await reconciler.handle((namespace, "twin"))
    old = cluster.get("sdd", "twin", namespace)["metadata"]["uid"]
    # Orphans stay: a Secret of the old owner, as it stands for a moment while the collector works.
    cluster.kubectl("delete", "sdd", "twin", "--cascade=orphan", namespace=namespace)
    secret = manifests.admin_secret(replace(deployment_with(), namespace=namespace, name="twin", uid=old), "t")
    cluster.apply(resource("twin"), dict(secret), namespace=namespace)
    deployment = deployment_of(cluster.get("sdd", "twin", namespace))
    found = await api.get(SECRETS, namespace, "twin-admin")
    if found is not None:  # the collector may have been faster; test_observe has the case for certain
        with pytest.raises(Unavailable, match="still being collected"):
            await observe(deployment, api, WorkerClient(), StateStore(api))
    wait_for("the collector works", lambda: not cluster.list("secret", f"{GROUP}/name=twin", namespace))
    assert await reconciler.handle((namespace, "twin")) == 5


async def test_a_refused_child_is_a_condition(
    api: KubeClient, namespace: str, cluster: Kubectl, kind_is_known: None
) -> None:
    bad = {"workers": {"template": {"spec": {"containers": [{"name": "worker", "image": ""}], "restartPolicy": "No"}}}}
    cluster.apply(resource("refused", **bad), namespace=namespace)
    await Reconciler(api, WorkerClient(), StateStore(api), DEFAULTS, poll_seconds=5).handle((namespace, "refused"))
    conditions = {c["type"]: c for c in cluster.get("sdd", "refused", namespace)["status"]["conditions"]}
    assert conditions["Stalled"]["reason"] == "ChildRefused"
    assert "restartPolicy" in conditions["Stalled"]["message"]
    assert await api.get(WORKLOADS, namespace, "refused-worker") is None


async def test_a_verdict_in_a_termination_message_becomes_a_condition(
    api: KubeClient, namespace: str, cluster: Kubectl, kind_is_known: None
) -> None:
    """A pod that nobody schedules, with a status as the kubelet would write it."""
    cluster.apply(resource("large"), namespace=namespace)
    reconciler = Reconciler(api, WorkerClient(), StateStore(api), DEFAULTS, poll_seconds=5)
    await reconciler.handle((namespace, "large"))
    strategy = cluster.get("deploy", "large-worker", namespace)["spec"]["strategy"]
    assert strategy["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}, "no pod goes before another serves"
    container = {"name": "worker", "image": "none"}
    spec = {"schedulerName": "nobody", "containers": [container]}
    metadata = {"name": "large-pod", "labels": manifests.selector("large")}
    cluster.apply({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}, namespace=namespace)
    verdict = CheckVerdict(serves=False, fits=False, problem="0.26 GiB short", memory=MemoryState(limit=2**31))
    ended = {"terminated": {"exitCode": 1, "message": verdict.model_dump_json()}}
    waiting = {"waiting": {"reason": "CrashLoopBackOff"}}
    told = {**container, "imageID": "", "ready": False, "restartCount": 1, "state": waiting, "lastState": ended}
    patch = json.dumps({"status": {"containerStatuses": [told]}})
    words = ("patch", "pod", "large-pod", "--subresource=status", "--type=merge", "-p", patch)
    cluster.kubectl(*words, namespace=namespace)
    await reconciler.handle((namespace, "large"))
    status = cluster.get("sdd", "large", namespace)["status"]
    conditions = {found["type"]: found for found in status["conditions"]}
    assert (conditions["MemoryFits"]["status"], conditions["MemoryFits"]["message"]) == ("False", "0.26 GiB short")
    assert status["memory"]["limit"] == "2.00Gi"
    cluster.kubectl("delete", "pod", "large-pod", "--wait=false", namespace=namespace)


# --- the process ----------------------------------------------------------------------------------------------------


class Wire:
    """A TCP wire to the API server that can be cut."""

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._open: list[socket.socket] = []
        self.whole = True
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        self.whole = False
        for end in self._open:
            with_reset(end)
        self._open = []

    def close(self) -> None:
        self.cut()
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            if not self.whole:
                with_reset(near)
                continue
            far = socket.create_connection(self._target)
            self._open += [near, far]
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=_pump, args=(source, sink), daemon=True).start()


def with_reset(end: socket.socket) -> None:
    with suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
    end.close()


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
    with_reset(sink)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@pytest.fixture
def wire(cluster: Kubectl, tmp_path: Path) -> Iterator[Wire]:
    """The wire, and a kubeconfig that leads through it."""
    config = yaml.safe_load(cluster.kubectl("config", "view", "--raw", "--minify", "--flatten"))
    server = config["clusters"][0]["cluster"]
    host, _, port = server["server"].removeprefix("https://").rpartition(":")
    made = Wire(host, int(port))
    server["server"] = f"https://127.0.0.1:{made.port}"
    server["tls-server-name"] = host
    (tmp_path / "kubeconfig").write_text(yaml.safe_dump(config))
    yield made
    made.close()


@pytest.fixture
def process(wire: Wire, namespace: str, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """`specdecode-operator run` on loopback, for the test's namespace alone."""
    environment = {
        **os.environ,
        "KUBECONFIG": str(tmp_path / "kubeconfig"),
        "SPECDECODE_OPERATOR_WATCH_NAMESPACES": namespace,
        "SPECDECODE_OPERATOR_LISTEN_ADDRESS": "127.0.0.1",
        "SPECDECODE_OPERATOR_PORT_HEALTH": str(free_port()),
        "SPECDECODE_OPERATOR_PORT_METRICS": str(free_port()),
        "SPECDECODE_OPERATOR_POLL_SECONDS": "1",
    }
    with (tmp_path / "log").open("wb") as log:
        command = [str(Path(sys.executable).parent / "specdecode-operator"), "run"]
        running = subprocess.Popen(command, env=environment, stderr=log, stdout=log)
    yield running
    running.send_signal(signal.SIGTERM)
    assert running.wait(timeout=20) == 0, (tmp_path / "log").read_text()[-2000:]


def resident_mib(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))


def test_cut_off_from_the_api_server_it_stays_alive_and_recovers(
    process: subprocess.Popen[bytes], wire: Wire, cluster: Kubectl, namespace: str, kind_is_known: None
) -> None:
    cluster.apply(resource("cut"), namespace=namespace)
    wait_for("the workload", lambda: cluster.get("deploy", "cut-worker", namespace), timeout_s=30)
    wire.cut()
    cluster.kubectl("scale", "sdd", "cut", "--replicas=0", namespace=namespace)
    change = {"spec": {"drain": {"gracePeriodSeconds": 77}}}
    cluster.kubectl("patch", "sdd", "cut", "--type=merge", "-p", json.dumps(change), namespace=namespace)
    with pytest.raises(AssertionError):
        wait_for("no change while it is cut off", lambda: grace(cluster, namespace) == 92, timeout_s=8)
    assert process.poll() is None, "the operator died with its API server"
    wire.whole = True
    wait_for("the change is applied", lambda: grace(cluster, namespace) == 92, timeout_s=60)
    cluster.apply(resource("after"), namespace=namespace)
    wait_for("a new resource is seen", lambda: cluster.get("deploy", "after-worker", namespace), timeout_s=45)
    assert resident_mib(process.pid) <= MOST_MEMORY_MIB


def test_started_before_its_api_server(
    wire: Wire, request: pytest.FixtureRequest, cluster: Kubectl, namespace: str, kind_is_known: None
) -> None:
    wire.cut()
    process: subprocess.Popen[bytes] = request.getfixturevalue("process")
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=6)
    wire.whole = True
    cluster.apply(resource("early"), namespace=namespace)
    wait_for("the workload", lambda: cluster.get("deploy", "early-worker", namespace), timeout_s=45)


def grace(cluster: Kubectl, namespace: str) -> int:
    found = cluster.get("deploy", "cut-worker", namespace)
    return int(found["spec"]["template"]["spec"]["terminationGracePeriodSeconds"])
