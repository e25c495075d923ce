"""Kubernetes objects of a deployment, as pure functions of its spec."""

from specdecode_operator.manifests.config import is_pinned, model_uris, unpinned_uris, worker_config
from specdecode_operator.manifests.identity import (
    NAME_LABEL,
    ROLE_LABEL,
    SPEC_HASH_ANNOTATION,
    VARIANT_LABEL,
    Role,
    TokenScope,
    child_names,
    demand_name,
    headless_name,
    plan_name,
    policy_name,
    prefetch_name,
    prefill_name,
    router_labels,
    router_name,
    selector,
    service_url,
    state_name,
    tokens_name,
    worker_name,
)
from specdecode_operator.manifests.jobs import (
    RUN_LABEL,
    check_job_template,
    deletion_job,
    deletion_job_name,
    distillation_job,
    job_name,
)
from specdecode_operator.manifests.objects import (
    budget,
    headless_service,
    network_policy,
    plan_config_map,
    service,
    state_config_map,
    tokens_secret,
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
from specdecode_operator.manifests.template import (
    pod_template,
    prefetch_daemon_set,
    prefill_workload,
    resolved_image,
    rolling_hash,
    workload,
)
