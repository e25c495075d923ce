"""etcd, the API server, the controller manager and the scheduler, on loopback and the node's bridge."""

from __future__ import annotations

import shutil

from localcluster import certificates, daemons
from localcluster.console import step, wait_for
from localcluster.settings import (
    ETCD_PEER_URL,
    ETCD_URL,
    NODE_ADDRESS,
    POD_NETWORK,
    SERVICE_NETWORK,
    Layout,
)
from localcluster.shell import run, succeeds

DAEMONS = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler")


def ensure(layout: Layout) -> None:
    """Start what does not run, until the API server answers and the default service account exists."""
    if certificates.ensure(layout):
        shutil.rmtree(layout.state / "etcd", ignore_errors=True)  # its tokens were signed by the old key
    with step("Starting etcd and the Kubernetes control plane"):
        daemons.start(layout, "etcd", _etcd(layout))
        daemons.start(layout, "kube-apiserver", _api_server(layout))
        _wait(layout, "the API server", ["get", "--raw", "/readyz"])
        daemons.start(layout, "kube-controller-manager", _controller_manager(layout))
        daemons.start(layout, "kube-scheduler", _scheduler(layout))
        _wait(layout, "the controller manager", ["get", "serviceaccount", "default"])


def stop(layout: Layout) -> None:
    for name in reversed(DAEMONS):
        daemons.stop(layout, name)


def kubectl(layout: Layout, *words: str, stdin: str | None = None) -> str:
    """kubectl as the administrator."""
    command = [layout.kubectl, "--kubeconfig", layout.kubeconfig, *words]
    return run(command, stdin=stdin, env=_kubectl_environment(layout))


def answers(layout: Layout, *words: str) -> bool:
    """Whether a kubectl command succeeds."""
    command = [layout.kubectl, "--kubeconfig", layout.kubeconfig, "--request-timeout=5s", *words]
    return layout.kubeconfig.exists() and succeeds(command, env=_kubectl_environment(layout))


def _kubectl_environment(layout: Layout) -> dict[str, str]:
    return {"KUBECACHEDIR": str(layout.state / "kubectl-cache"), "NO_PROXY": NODE_ADDRESS}


def _wait(layout: Layout, what: str, words: list[str]) -> None:
    wait_for(
        what,
        lambda: answers(layout, *words),
        timeout_s=300,
        check=lambda: daemons.check_alive(
            layout, *(name for name in DAEMONS if (layout.pids / f"{name}.json").exists())
        ),
    )


def _etcd(layout: Layout) -> list[str]:
    return [
        "etcd",
        "--name=local",
        f"--data-dir={layout.state / 'etcd'}",
        f"--listen-client-urls={ETCD_URL}",
        f"--advertise-client-urls={ETCD_URL}",
        f"--listen-peer-urls={ETCD_PEER_URL}",
        f"--initial-advertise-peer-urls={ETCD_PEER_URL}",
        f"--initial-cluster=local={ETCD_PEER_URL}",
        "--unsafe-no-fsync",  # a cluster to try things on: faster, and lost only with the machine
    ]


def _api_server(layout: Layout) -> list[str]:
    pki = layout.pki
    return [
        "kube-apiserver",
        f"--etcd-servers={ETCD_URL}",
        f"--bind-address={NODE_ADDRESS}",
        f"--advertise-address={NODE_ADDRESS}",
        "--secure-port=6443",
        f"--tls-cert-file={pki}/apiserver.crt",
        f"--tls-private-key-file={pki}/apiserver.key",
        f"--client-ca-file={pki}/ca.crt",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        "--allow-privileged=true",
        f"--service-cluster-ip-range={SERVICE_NETWORK}",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-key-file={pki}/service-accounts.pub",
        f"--service-account-signing-key-file={pki}/service-accounts.key",
        f"--kubelet-certificate-authority={pki}/ca.crt",
        f"--kubelet-client-certificate={pki}/apiserver-to-kubelet.crt",
        f"--kubelet-client-key={pki}/apiserver-to-kubelet.key",
        "--kubelet-preferred-address-types=InternalIP",
        f"--requestheader-client-ca-file={pki}/front-proxy-ca.crt",
        "--requestheader-allowed-names=front-proxy-client",
        "--requestheader-username-headers=X-Remote-User",
        "--requestheader-group-headers=X-Remote-Group",
        "--requestheader-extra-headers-prefix=X-Remote-Extra-",
        f"--proxy-client-cert-file={pki}/front-proxy-client.crt",
        f"--proxy-client-key-file={pki}/front-proxy-client.key",
    ]


def _controller_manager(layout: Layout) -> list[str]:
    pki = layout.pki
    return [
        "kube-controller-manager",
        *_as_client(layout, "controller-manager"),
        f"--root-ca-file={pki}/ca.crt",
        f"--service-account-private-key-file={pki}/service-accounts.key",
        "--use-service-account-credentials=true",
        "--allocate-node-cidrs=true",
        f"--cluster-cidr={POD_NETWORK}",
        f"--service-cluster-ip-range={SERVICE_NETWORK}",
        f"--cluster-signing-cert-file={pki}/ca.crt",
        f"--cluster-signing-key-file={pki}/ca.key",
    ]


def _scheduler(layout: Layout) -> list[str]:
    return ["kube-scheduler", *_as_client(layout, "scheduler")]


def _as_client(layout: Layout, user: str) -> list[str]:
    """What the two leader-electable components share; there is one of each, so no election."""
    kubeconfig = layout.kubeconfig.parent / f"{user}.conf"
    return [
        f"--kubeconfig={kubeconfig}",
        f"--authentication-kubeconfig={kubeconfig}",
        f"--authorization-kubeconfig={kubeconfig}",
        "--bind-address=127.0.0.1",
        "--leader-elect=false",
    ]
