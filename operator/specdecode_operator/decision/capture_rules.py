"""Capture of requests in the plan, from the spec and the stored rollout of drafts. Pure."""

from __future__ import annotations

from pydantic import ValidationError

from specdecode_operator.api.v1alpha1 import DistillationCaptureSpec, seconds_of
from specdecode_operator.errors import SpecError
from specdecode_operator.manifests.config import byte_count
from specdecode_operator.state.draft_record import DraftRecord
from specdecode_operator.types import Deployment
from specdecode_worker.contract.capture import CaptureRules

MAX_BYTES = 14 * 2**30
"""Most bytes of captures on one worker. The rest of the volume's limit is for a segment that is being written."""
_FIELDS = {
    "share": "share",
    "task_shares": "shareByTask",
    "max_bytes": "maxBytes",
    "max_age_seconds": "maxAge",
    "redact": "redact",
}
"""Field of the spec by field of the plan, for errors."""


def capture_rules(deployment: Deployment, record: DraftRecord) -> CaptureRules | None:
    """Return the capture that the plan switches on; None where the spec does not enable it.

    Raises:
        SpecError: A value is out of range. The message names the field.
    """
    capture = deployment.spec.distillation.capture
    if not capture.enabled:
        return None
    if _bytes(capture) > MAX_BYTES:
        raise SpecError(f"distillation.capture.maxBytes is {capture.max_bytes}; at most 14Gi fit")
    try:
        return CaptureRules(
            share=capture.share,
            task_shares=dict(sorted(capture.share_by_task.items())),
            max_bytes=_bytes(capture),
            max_age_seconds=seconds_of(capture.max_age),
            redact=capture.redact,
            consent=capture.consent,
            delete_before=record.captures_deleted_before,
        )
    except ValidationError as error:
        first = error.errors()[0]
        name = _FIELDS.get(str(first["loc"][0]), str(first["loc"][0]))
        raise SpecError(f"distillation.capture.{name}: {first['msg']} (it is {first['input']})") from error


def _bytes(capture: DistillationCaptureSpec) -> int:
    return byte_count(str(capture.max_bytes), "distillation.capture.maxBytes")
