"""Capture of requests in the plan, from the spec and the stored rollout of drafts. Pure."""

from __future__ import annotations

from pydantic import ValidationError

from specdecode_operator.api.v1alpha1 import seconds_of
from specdecode_operator.errors import SpecError
from specdecode_operator.state.draft_record import DraftRecord
from specdecode_operator.types import Deployment
from specdecode_worker.contract.capture import CaptureRules

_FIELDS = {"share": "percent", "task_shares": "percentByTask", "max_age_seconds": "maxAge", "redact": "redact"}
"""Field of the spec by field of the plan, for errors."""


def capture_rules(deployment: Deployment, record: DraftRecord) -> CaptureRules | None:
    """Return the capture that the plan switches on; None where the spec has none.

    Raises:
        SpecError: A value is out of range. The message names the field.
    """
    capture = deployment.spec.distillation.capture
    if capture is None:
        return None
    try:
        return CaptureRules(
            share=capture.percent / 100,
            task_shares={task: percent / 100 for task, percent in sorted(capture.percent_by_task.items())},
            max_age_seconds=seconds_of(capture.max_age),
            redact=capture.redact,
            consent=capture.consent,
            delete_before=record.captures_deleted_before,
        )
    except ValidationError as error:
        first = error.errors()[0]
        name = _FIELDS.get(str(first["loc"][0]), str(first["loc"][0]))
        raise SpecError(f"distillation.capture.{name}: {first['msg']} (it is {first['input']})") from error
