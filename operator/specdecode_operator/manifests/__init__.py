"""Kubernetes objects that a deployment consists of, as pure functions of its spec. Applied by cluster.py."""

from specdecode_operator.manifests.config import worker_config
from specdecode_operator.manifests.identity import (
    ADMIN_TOKEN_KEY,
    DELETION_COST_ANNOTATION,
    PLAN_KEY,
    SPEC_HASH_ANNOTATION,
    admin_secret_name,
    child_names,
    plan_name,
    selector,
    service_url,
    state_name,
    worker_name,
)
from specdecode_operator.manifests.objects import admin_secret, budget, plan_config_map, service, state_config_map
from specdecode_operator.manifests.template import pod_template, rolling_hash
from specdecode_operator.manifests.workload import resolved_image, workload

__all__ = [
    "ADMIN_TOKEN_KEY",
    "DELETION_COST_ANNOTATION",
    "PLAN_KEY",
    "SPEC_HASH_ANNOTATION",
    "admin_secret",
    "admin_secret_name",
    "budget",
    "child_names",
    "plan_config_map",
    "plan_name",
    "pod_template",
    "resolved_image",
    "rolling_hash",
    "selector",
    "service",
    "service_url",
    "state_config_map",
    "state_name",
    "worker_config",
    "worker_name",
    "workload",
]
