"""The API server as the user may see it: the plugin's only I/O. Foreign errors become PluginError here, once."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import urllib3
from kubernetes import client, config
from kubernetes.config.config_exception import ConfigException
from pydantic import ValidationError

from specdecode_operator.api.v1alpha1 import GROUP, PIN_ANNOTATION, PLURAL, VERSION
from specdecode_operator.errors import PluginError
from specdecode_operator.state.learned import LearnedState

Resource = dict[str, Any]

_TIMEOUT = (5.0, 30.0)
"""Seconds to connect and to read."""


class Api:
    """SpecDecodeDeployments of one cluster, with the rights of the user."""

    def __init__(self, kubeconfig: str | None = None, context: str | None = None) -> None:
        settings = client.Configuration()
        try:
            config.load_kube_config(config_file=kubeconfig, context=context, client_configuration=settings)
            self.namespace = _namespace(kubeconfig, context)
        except (ConfigException, OSError) as error:
            raise PluginError(f"no cluster: {error}; set KUBECONFIG, or give --kubeconfig or --context") from error
        settings.retries = False
        self._host = settings.host
        connection = client.ApiClient(settings)
        self._ours = client.CustomObjectsApi(connection)
        self._core = client.CoreV1Api(connection)

    def list(self, namespace: str | None) -> list[Resource]:
        """All of a namespace; of the cluster when it is None."""
        if namespace is None:
            found = self._call(lambda: self._ours.list_cluster_custom_object(GROUP, VERSION, PLURAL, **_limits()))
        else:
            found = self._call(
                lambda: self._ours.list_namespaced_custom_object(GROUP, VERSION, namespace, PLURAL, **_limits())
            )
        return list(found["items"])

    def get(self, namespace: str, name: str) -> Resource:
        found: Resource = self._call(
            lambda: self._ours.get_namespaced_custom_object(GROUP, VERSION, namespace, PLURAL, name, **_limits())
        )
        return found

    def remembered(self, namespace: str, name: str) -> LearnedState | None:
        """What the operator wrote down; None where there is nothing yet, or another version wrote it."""
        found = self._call(
            lambda: self._core.read_namespaced_config_map(
                f"{name}-state", namespace, _preload_content=False, **_limits()
            )
        )
        try:
            return LearnedState.model_validate_json(json.loads(found.data)["data"]["memory.json"])
        except (KeyError, ValueError, ValidationError):
            return None

    def pin(self, namespace: str, name: str, text: str | None) -> Resource:
        """Sets the annotation, or takes it off; returns the resource as it is now."""
        body = {"metadata": {"annotations": {PIN_ANNOTATION: text}}}
        found: Resource = self._call(
            lambda: self._ours.patch_namespaced_custom_object(
                GROUP,
                VERSION,
                namespace,
                PLURAL,
                name,
                body,
                field_manager="kubectl-specdecode",
                _content_type="application/merge-patch+json",
                **_limits(),
            )
        )
        return found

    def _call(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except client.ApiException as error:
            raise PluginError(_sentence(error)) from error
        except (urllib3.exceptions.HTTPError, OSError) as error:
            reason = str(getattr(error, "reason", None) or error)
            raise PluginError(f"the cluster at {self._host} does not answer: {reason}") from error


def _limits() -> dict[str, Any]:
    return {"_request_timeout": _TIMEOUT}


def _namespace(kubeconfig: str | None, context: str | None) -> str:
    """Of the context that is used, as kubectl goes by it."""
    contexts, active = config.list_kube_config_contexts(config_file=kubeconfig)
    chosen = next((found for found in contexts if found["name"] == context), active)
    return str(chosen["context"].get("namespace") or "default")


def _sentence(error: client.ApiException) -> str:
    """A missing kind answers in plain text, a missing object as a Status that names it."""
    try:
        message = str(json.loads(error.body)["message"])
    except (TypeError, ValueError, KeyError):
        message = ""
    if error.status == 404 and not message:
        return f"this cluster does not know {PLURAL}.{GROUP}: install the chart, or the files in crds/"
    if error.status == 401:
        return f"the cluster does not know who you are: {message or error.reason}; renew the credentials of the context"
    if error.status == 403:
        return f"you may not do this: {message or error.reason}"
    return message or f"the API server answered {error.status} {error.reason}"
