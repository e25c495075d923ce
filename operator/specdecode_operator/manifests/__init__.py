"""Kubernetes objects of a deployment, as pure functions of its spec."""

from specdecode_operator.api.v1alpha1 import NAME_LABEL
from specdecode_operator.manifests.jobs import (
    RUN_LABEL,
    check_job_template,
    deletion_job,
    deletion_job_name,
    distillation_job,
    job_name,
)
from specdecode_operator.manifests.objects import (
    ROLE_LABEL,
    SPEC_HASH_ANNOTATION,
    VARIANT_LABEL,
    Role,
    TokenScope,
    budget,
    child_names,
    demand_name,
    headless_name,
    headless_service,
    network_policy,
    plan_config_map,
    plan_name,
    prefetch_name,
    prefill_name,
    router_labels,
    router_name,
    selector,
    service,
    service_url,
    state_config_map,
    state_name,
    tokens_name,
    tokens_secret,
    worker_name,
)
from specdecode_operator.manifests.pods import (
    is_pinned,
    model_uris,
    pod_template,
    prefetch_daemon_set,
    prefill_workload,
    resolved_image,
    rolling_hash,
    unpinned_uris,
    worker_config,
    workload,
)
from specdecode_operator.manifests.router import (
    demand_config_map,
    router_account,
    router_budget,
    router_role,
    router_role_binding,
    router_settings,
    router_workload,
)
