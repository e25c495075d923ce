"""The cluster's own certificate authority, a certificate per component, and their kubeconfigs.

Elliptic keys: all of it takes under a second. Made once per cluster; the folder appears whole or not at all.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from localcluster.console import step
from localcluster.settings import API_URL, NODE_ADDRESS, NODE_NAME, SERVICE_OF_API, Layout
from localcluster.shell import run, succeeds

_DAYS = "365"
_MONTH_S = 30 * 24 * 3600


@dataclass(frozen=True, slots=True)
class Certificate:
    """One leaf: what it may be used for follows from its names and its authority."""

    name: str
    subject: str
    usage: str = "clientAuth"
    hosts: str = ""
    authority: str = "ca"


_API_HOSTS = (
    "DNS:kubernetes,DNS:kubernetes.default,DNS:kubernetes.default.svc,"
    f"DNS:kubernetes.default.svc.cluster.local,IP:{SERVICE_OF_API},IP:{NODE_ADDRESS},IP:127.0.0.1"
)
_CERTIFICATES = (
    Certificate("apiserver", "/CN=kube-apiserver", "serverAuth", _API_HOSTS),
    Certificate("apiserver-to-kubelet", "/O=system:masters/CN=kube-apiserver-kubelet-client"),
    Certificate("front-proxy-client", "/CN=front-proxy-client", authority="front-proxy-ca"),
    Certificate("kubelet-server", f"/CN={NODE_NAME}", "serverAuth", f"DNS:{NODE_NAME},IP:{NODE_ADDRESS}"),
)
_USERS = (
    Certificate("admin", "/O=system:masters/CN=admin"),
    Certificate("controller-manager", "/CN=system:kube-controller-manager"),
    Certificate("scheduler", "/CN=system:kube-scheduler"),
    Certificate("kube-proxy", "/CN=system:kube-proxy"),
    Certificate("kubelet", f"/O=system:nodes/CN=system:node:{NODE_NAME}"),
)


def ensure(layout: Layout) -> bool:
    """Make what is missing or about to expire; True when it was made anew (old tokens are then worthless)."""
    if _usable(layout.pki):
        return False
    with step("Making certificates"):
        scratch = layout.state / ".pki"
        for leftover in (scratch, layout.pki, layout.kubeconfig.parent):
            shutil.rmtree(leftover, ignore_errors=True)
        scratch.mkdir(parents=True, mode=0o700)
        _make_all(scratch)
        layout.kubeconfig.parent.mkdir(mode=0o700)
        for user in _USERS:
            _write_kubeconfig(layout, user.name)
        scratch.rename(layout.pki)  # at last: with this folder all is there
    return True


def _usable(pki: Path) -> bool:
    expiry = ["openssl", "x509", "-noout", "-checkend", str(_MONTH_S), "-in", pki / "ca.crt"]
    return (pki / "ca.crt").exists() and succeeds(expiry)


def _make_all(folder: Path) -> None:
    for authority in ("ca", "front-proxy-ca"):
        _make_authority(folder, authority)
    for certificate in (*_CERTIFICATES, *_USERS):
        _make_certificate(folder, certificate)
    run(["openssl", "genrsa", "-out", folder / "service-accounts.key", "2048"])
    private, public = folder / "service-accounts.key", folder / "service-accounts.pub"
    run(["openssl", "rsa", "-in", private, "-pubout", "-out", public])


def _make_key(folder: Path, name: str) -> Path:
    key = folder / f"{name}.key"
    run(["openssl", "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", key])
    return key


def _make_authority(folder: Path, name: str) -> None:
    key = _make_key(folder, name)
    extensions = [
        *("-addext", "basicConstraints=critical,CA:TRUE"),
        *("-addext", "keyUsage=critical,keyCertSign,cRLSign,digitalSignature"),
    ]
    request = ["openssl", "req", "-x509", "-new", "-key", key, "-subj", f"/CN=specdecode-{name}"]
    run([*request, "-days", _DAYS, *extensions, "-out", folder / f"{name}.crt"])


def ensure_for_node(cluster: Layout, node: Layout, name: str, address: str) -> None:
    """Make the certificates and the kubeconfig of a further node's kubelet in the node's own folder.

    They are made again when the cluster has another authority than before.
    """
    authority, kubeconfig = node.pki / "ca.crt", node.kubeconfig.parent / "kubelet.conf"
    if kubeconfig.exists() and authority.read_bytes() == (cluster.pki / "ca.crt").read_bytes():
        return
    for folder in (node.pki, node.kubeconfig.parent):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True, mode=0o700)
    shutil.copy(cluster.pki / "ca.crt", node.pki)
    server = Certificate("kubelet-server", f"/CN={name}", "serverAuth", f"DNS:{name},IP:{address}")
    client = Certificate("kubelet", f"/O=system:nodes/CN=system:node:{name}")
    for certificate in (server, client):
        _make_certificate(node.pki, certificate, cluster.pki)
    _write_kubeconfig(node, client.name)


def _make_certificate(folder: Path, certificate: Certificate, authorities: Path | None = None) -> None:
    """Make a key and a certificate in a folder, signed by an authority of that folder or of another one."""
    key = _make_key(folder, certificate.name)
    extensions = folder / f"{certificate.name}.ext"
    extensions.write_text(_extensions(certificate))
    request = run(["openssl", "req", "-new", "-key", key, "-subj", certificate.subject])
    authority = (authorities or folder) / certificate.authority
    signing = ["-CA", f"{authority}.crt", "-CAkey", f"{authority}.key", "-CAcreateserial"]
    out = folder / f"{certificate.name}.crt"
    run(
        ["openssl", "x509", "-req", *signing, "-days", _DAYS, "-extfile", extensions, "-out", out],
        stdin=request,
    )
    extensions.unlink()


def _extensions(certificate: Certificate) -> str:
    lines = [
        "basicConstraints=critical,CA:FALSE",
        "keyUsage=critical,digitalSignature,keyEncipherment",
        f"extendedKeyUsage={certificate.usage}",
    ]
    if certificate.hosts:
        lines.append(f"subjectAltName={certificate.hosts}")
    return "\n".join(lines) + "\n"


def _write_kubeconfig(layout: Layout, user: str) -> None:
    """JSON is YAML: no library is needed to write one."""
    pki = layout.pki
    credentials = {"client-certificate": f"{pki}/{user}.crt", "client-key": f"{pki}/{user}.key"}
    cluster = {"server": API_URL, "certificate-authority": f"{pki}/ca.crt"}
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "specdecode", "cluster": cluster}],
        "users": [{"name": user, "user": credentials}],
        "contexts": [{"name": "specdecode", "context": {"cluster": "specdecode", "user": user}}],
        "current-context": "specdecode",
    }
    file = layout.kubeconfig.parent / f"{user}.conf"
    file.write_text(json.dumps(document, indent=2) + "\n")
    file.chmod(0o600)
