"""Ports, routes, headers, environment variables and metric names that operator and worker share."""

from __future__ import annotations

from enum import StrEnum


class Port:
    """Ports of a worker. The public Service exposes the first alone; ``blocks`` is for workers of the deployment."""

    http = 8000
    admin = 8001
    blocks = 8002


class Route:
    """Paths that the operator calls on the admin port. All except health need the bearer token."""

    report = "/v1/report"
    plan = "/v1/plan"
    synthetic = "/v1/synthetic"
    drain = "/v1/drain"
    draft = "/v1/draft"
    captures = "/v1/captures"
    """List of finished segments of captured traffic; one segment is below it, by its name."""
    capture_deletions = "/v1/captures/deletions"
    """Deletion of the captured requests of one user. The body names the user."""


class Header:
    """HTTP headers of the admin port's report, in addition to ETag and If-None-Match."""

    clock_seconds = "X-Specdecode-Clock-Seconds"
    """Sent with a 304: the worker's clock, the only field of the report that has changed."""


class Env:
    """Names of the environment variables that a worker pod is started with."""

    config = "SPECDECODE_CONFIG"
    admin_token = "SPECDECODE_ADMIN_TOKEN"
    """Token of the admin port with the scope operator. Unset, the worker makes one. A blank value is refused."""
    capture_token = "SPECDECODE_CAPTURE_TOKEN"
    """Token of workers' admin ports with the scope capture, for `distill --capture-from`."""
    plan_path = "SPECDECODE_PLAN_PATH"
    revisions_path = "SPECDECODE_REVISIONS_PATH"
    """File with the Revisions of models whose URI names no commit. It need not exist."""
    cache_limit = "SPECDECODE_CACHE_LIMIT"
    """Bytes that the model cache of a pod may hold, a space, and its folder. A pod with more in it would be evicted."""
    pod_name = "POD_NAME"
    synthetic = "SPECDECODE_SYNTHETIC"
    """SyntheticKnobs as JSON, active from the first step. Set in tests only."""
    api_keys = "SPECDECODE_API_KEYS"
    """Keys of the public port, separated by white space. Unset disables authentication. A blank value is refused."""


class Metric(StrEnum):
    """Metric names on /metrics: vLLM's names with this project's prefix where vLLM has an equivalent.

    Those of ``metrics.VLLM_METRICS`` are exported under vLLM's own names too.
    """

    num_drafts = "specdecode_spec_decode_num_drafts"
    num_draft_tokens = "specdecode_spec_decode_num_draft_tokens"
    num_accepted_tokens = "specdecode_spec_decode_num_accepted_tokens"
    num_accepted_tokens_per_pos = "specdecode_spec_decode_num_accepted_tokens_per_pos"
    num_ranked = "specdecode_spec_decode_num_ranked"
    num_plain_steps = "specdecode_spec_decode_num_plain_steps"
    num_decode_steps = "specdecode_spec_decode_num_decode_steps"
    num_decode_tokens = "specdecode_spec_decode_num_decode_tokens"
    draft_info = "specdecode_draft_info"
    prompt_tokens = "specdecode_prompt_tokens"
    generation_tokens = "specdecode_generation_tokens"
    request_success = "specdecode_request_success"
    num_requests_running = "specdecode_num_requests_running"
    num_requests_waiting = "specdecode_num_requests_waiting"
    num_preemptions = "specdecode_num_preemptions"
    prefill_chunks = "specdecode_prefill_chunks"
    prefix_cache_queries = "specdecode_prefix_cache_queries"
    prefix_cache_hits = "specdecode_prefix_cache_hits"
    remote_prefills = "specdecode_remote_prefills"
    remote_prefill_failures = "specdecode_remote_prefill_failures"
    remote_prefill_tokens = "specdecode_remote_prefill_tokens"
    remote_prefill_bytes = "specdecode_remote_prefill_bytes"
    kv_cache_usage_perc = "specdecode_kv_cache_usage_perc"
    kv_cache_reusable_perc = "specdecode_kv_cache_reusable_perc"
    memory_bytes = "specdecode_memory_bytes"
    time_to_first_token_seconds = "specdecode_time_to_first_token_seconds"
    inter_token_latency_seconds = "specdecode_inter_token_latency_seconds"
    e2e_request_latency_seconds = "specdecode_e2e_request_latency_seconds"
    request_queue_time_seconds = "specdecode_request_queue_time_seconds"
    request_prompt_tokens = "specdecode_request_prompt_tokens"
    request_generation_tokens = "specdecode_request_generation_tokens"
    request_time_per_output_token_seconds = "specdecode_request_time_per_output_token_seconds"
    request_timeouts = "specdecode_request_timeouts"
    api_key_requests = "specdecode_api_key_requests"
    api_key_request_success = "specdecode_api_key_request_success"
    api_key_prompt_tokens = "specdecode_api_key_prompt_tokens"
    api_key_generation_tokens = "specdecode_api_key_generation_tokens"
    api_key_time_to_first_token_seconds = "specdecode_api_key_time_to_first_token_seconds"
    api_key_e2e_request_latency_seconds = "specdecode_api_key_e2e_request_latency_seconds"
    iteration_seconds = "specdecode_iteration_seconds"
    step_phase_seconds = "specdecode_step_phase_seconds"
    plan_version = "specdecode_plan_version"
    guard_suppressed = "specdecode_guard_suppressed"
    guard_state = "specdecode_guard_state"
    guard_time_per_token_seconds = "specdecode_guard_time_per_token_seconds"
    synthetic = "specdecode_synthetic"
    capture_records = "specdecode_capture_records"
    capture_dropped = "specdecode_capture_dropped"
    capture_stored_bytes = "specdecode_capture_stored_bytes"
