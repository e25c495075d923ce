"""A small client of the Kubernetes API over one HTTP connection pool: faster than one kubectl process per request."""

from __future__ import annotations

import json
import ssl
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import httpx
from kubernetes.client import Configuration
from kubernetes.config import load_kube_config

from support.kube import KubectlError, Manifest

SDD = "apis/specdecode.io/v1alpha1", "specdecodedeployments"
KINDS = {
    "sdd": SDD,
    "namespace": ("api/v1", "namespaces"),
    "pod": ("api/v1", "pods"),
    "service": ("api/v1", "services"),
    "configmap": ("api/v1", "configmaps"),
    "secret": ("api/v1", "secrets"),
    "quota": ("api/v1", "resourcequotas"),
    "limitrange": ("api/v1", "limitranges"),
    "deployment": ("apis/apps/v1", "deployments"),
    "pdb": ("apis/policy/v1", "poddisruptionbudgets"),
    "webhook": ("apis/admissionregistration.k8s.io/v1", "validatingwebhookconfigurations"),
}
MERGE_PATCH = "application/merge-patch+json"


class ApiError(KubectlError):
    """An error answer of the API server, which `wait_for` takes as "not yet". The message is the server's."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Api:
    """Requests to the API server, with the credentials of a kubeconfig. Thread-safe."""

    def __init__(self, kubeconfig: str | None) -> None:
        configuration = Configuration()
        load_kube_config(config_file=kubeconfig, client_configuration=configuration)
        self.host: str = configuration.host
        self.tls = ssl.create_default_context(cafile=configuration.ssl_ca_cert)
        if configuration.cert_file:
            self.tls.load_cert_chain(configuration.cert_file, configuration.key_file)
        token = (configuration.api_key or {}).get("authorization", "")
        headers = {"Authorization": token} if token else {}
        self._http = httpx.Client(base_url=self.host, verify=self.tls, headers=headers, timeout=30, trust_env=False)

    def get(self, kind: str, namespace: str | None, name: str) -> Manifest:
        """Return an object. Raises ApiError with status 404 if there is none."""
        return self._request("GET", path(kind, namespace, name))

    def find(self, kind: str, namespace: str | None, name: str) -> Manifest | None:
        try:
            return self.get(kind, namespace, name)
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    def list(self, kind: str, namespace: str | None, labels: str = "") -> list[Manifest]:
        items: list[Manifest] = self._request("GET", path(kind, namespace), labelSelector=labels)["items"]
        return items

    def create(self, kind: str, namespace: str | None, manifest: Manifest) -> Manifest:
        root = KINDS[kind][0].removeprefix("apis/").removeprefix("api/")
        return self._request("POST", path(kind, namespace), {"apiVersion": root, **manifest})

    def patch(self, kind: str, namespace: str | None, name: str, change: Manifest) -> Manifest:
        """Merge a change into an object."""
        return self._request("PATCH", path(kind, namespace, name), change, content_type=MERGE_PATCH)

    def delete(self, kind: str, namespace: str | None, name: str, *, propagation: str = "Background") -> None:
        """Delete an object; a missing one is no error."""
        try:
            self._request("DELETE", path(kind, namespace, name), {"propagationPolicy": propagation})
        except ApiError as error:
            if error.status != 404:
                raise

    def evict(self, namespace: str, pod: str) -> None:
        """Evict a pod through the Eviction API. Raises ApiError with status 429 if a budget refuses."""
        body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod, "namespace": namespace}}
        self._request("POST", path("pod", namespace, pod, "eviction"), body)

    def watch(self, kind: str, namespace: str, seconds: int, version: str = "") -> Iterator[tuple[str, Manifest]]:
        """Yield (type, object) of every change for a number of seconds, from a resource version on."""
        query = {"watch": "true", "timeoutSeconds": str(seconds), "resourceVersion": version}
        with self._http.stream("GET", path(kind, namespace), params=query, timeout=seconds + 10) as response:
            for line in response.iter_lines():
                event = json.loads(line)
                yield event["type"], event["object"]

    def version(self, kind: str, namespace: str) -> str:
        """Return the resource version of the list of a kind: the start of a watch."""
        return str(self._request("GET", path(kind, namespace), limit="1")["metadata"]["resourceVersion"])

    def _request(
        self, method: str, url: str, body: Any = None, *, content_type: str = "application/json", **query: str
    ) -> Manifest:
        content = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": content_type} if content else {}
        response = self._http.request(method, url, content=content, headers=headers, params=query)
        answer: Manifest = response.json()
        if response.status_code >= 300:
            raise ApiError(response.status_code, str(answer.get("message", answer)))
        return answer


def path(kind: str, namespace: str | None, name: str = "", subresource: str = "") -> str:
    """Return the URL path of an object or a list."""
    root, plural = KINDS[kind]
    scope = ["namespaces", quote(namespace)] if namespace else []
    return "/" + "/".join(filter(None, [root, *scope, plural, quote(name), subresource]))
