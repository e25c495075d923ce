"""Access to the API server with the user's rights: the plugin's only I/O. Errors become PluginError here, once."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import urllib3
from kubernetes import client, config
from kubernetes.config.config_exception import ConfigException

from specdecode_operator.api.draft import DRAFT_PLURAL
from specdecode_operator.api.v1alpha1 import GROUP, PLURAL, VERSION
from specdecode_operator.errors import PluginError
from specdecode_operator.state.learned import LearnedState, parse_state, plan_of

Resource = dict[str, Any]

_FIELD_MANAGER = "kubectl-specdecode"
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
            raise PluginError(f"no cluster: {error}; set KUBECONFIG, or use --kubeconfig or --context") from error
        settings.retries = False
        self._host = settings.host
        connection = client.ApiClient(settings)
        self._ours = client.CustomObjectsApi(connection)
        self._core = client.CoreV1Api(connection)

    def get(self, namespace: str, name: str) -> Resource:
        """Return one deployment."""
        read = self._ours.get_namespaced_custom_object
        resource: Resource = self._call(read, GROUP, VERSION, namespace, PLURAL, name)
        return resource

    def drafts(self, namespace: str, name: str) -> tuple[Resource, ...]:
        """Return the SpecDecodeDrafts of a deployment."""
        listed = self._call(self._ours.list_namespaced_custom_object, GROUP, VERSION, namespace, DRAFT_PLURAL)
        return tuple(one for one in listed["items"] if one["spec"]["deploymentRef"]["name"] == name)

    def create_draft(self, namespace: str, manifest: Resource) -> None:
        """Create a SpecDecodeDraft."""
        create = self._ours.create_namespaced_custom_object
        self._call(create, GROUP, VERSION, namespace, DRAFT_PLURAL, manifest, field_manager=_FIELD_MANAGER)

    def set_role(self, namespace: str, draft: str, role: str) -> None:
        """Change the role of a SpecDecodeDraft."""
        self._patch(namespace, draft, {"spec": {"role": role}}, "application/merge-patch+json", DRAFT_PLURAL)

    def learned_state(self, resource: Resource) -> LearnedState | None:
        """Return what the operator measured for a deployment, or None if it has not written anything readable yet."""
        uid = resource["metadata"]["uid"]
        try:
            plan = plan_of(self._config_map(resource["metadata"], "plan"), uid)
            return parse_state(self._config_map(resource["metadata"], "state"), uid, plan)
        except (AttributeError, ValueError):
            return None

    def _config_map(self, metadata: dict[str, Any], suffix: str) -> dict[str, str]:
        name, namespace = f"{metadata['name']}-{suffix}", metadata["namespace"]
        read = self._core.read_namespaced_config_map
        response = self._call(read, name, namespace, _preload_content=False)
        return json.loads(response.data).get("data") or {}

    def change(self, namespace: str, name: str, spec: dict[str, Any]) -> Resource:
        """Merge a change into the spec. Return the changed deployment."""
        return self._patch(namespace, name, {"spec": spec}, "application/merge-patch+json")

    def edit(self, namespace: str, name: str, operations: Sequence[dict[str, Any]]) -> Resource:
        """Change the deployment by operations of a JSON patch, which reach into lists. Return the changed one."""
        return self._patch(namespace, name, list(operations), "application/json-patch+json")

    def _patch(self, namespace: str, name: str, body: Any, content_type: str, plural: str = PLURAL) -> Resource:
        patch = self._ours.patch_namespaced_custom_object
        more = {"field_manager": _FIELD_MANAGER, "_content_type": content_type}
        resource: Resource = self._call(patch, GROUP, VERSION, namespace, plural, name, body, **more)
        return resource

    def _call(self, call: Callable[..., Any], *arguments: Any, **more: Any) -> Any:
        try:
            return call(*arguments, _request_timeout=_TIMEOUT, **more)
        except client.ApiException as error:
            raise PluginError(_sentence(error)) from error
        except (urllib3.exceptions.HTTPError, OSError) as error:
            reason = str(getattr(error, "reason", None) or error)
            raise PluginError(f"the API server at {self._host} does not answer: {reason}") from error


def _namespace(kubeconfig: str | None, context: str | None) -> str:
    """Return the namespace of the context in use, as kubectl does."""
    contexts, active = config.list_kube_config_contexts(config_file=kubeconfig)
    chosen = next((one for one in contexts if one["name"] == context), active)
    return str(chosen["context"].get("namespace") or "default")


def _sentence(error: client.ApiException) -> str:
    """Return the error as a sentence. For a missing kind the response is plain text, for a missing object a Status."""
    try:
        message = str(json.loads(error.body)["message"])
    except (TypeError, ValueError, KeyError):
        message = ""
    if error.status == 404 and not message:
        return f"this cluster does not know {PLURAL}.{GROUP}: install the chart, or apply the files in crds/"
    if error.status == 401:
        return f"the credentials are not valid: {message or error.reason}; renew the credentials of the context"
    if error.status == 403:
        return f"you do not have the rights for this: {message or error.reason}"
    return message or f"the API server answered {error.status} {error.reason}"
