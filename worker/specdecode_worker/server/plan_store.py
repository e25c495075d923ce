"""Current plan of the worker: read from the mounted file, checked against pushes, used to label requests."""

from __future__ import annotations

import logging
from pathlib import Path

from pydantic import ValidationError

from specdecode_worker.contract import OTHER_TASK, Plan
from specdecode_worker.server.errors import Conflict
from specdecode_worker.server.requests.body_parser import parse_contract

log = logging.getLogger(__name__)


class PlanStore:
    """Current plan, with the rules for its replacement.

    A new plan must have the same uid. While the draft stays the same, the version must not decrease. A version has one
    content for all workers, and one variant for workers with ``quiet`` set.
    """

    def __init__(self, uid: str, start: Plan) -> None:
        self._uid = uid
        self.current = start

    def check(self, plan: Plan) -> None:
        """Raise Conflict when ``plan`` must not replace the current plan."""
        if plan.uid != self._uid:
            raise Conflict(f"this worker belongs to uid {self._uid!r}, the plan to {plan.uid!r}", param="uid")
        current = self.current
        if plan.draft == current.draft and plan.version < current.version:
            raise Conflict(
                f"version {plan.version} is older than {current.version}, which is in force", param="version"
            )
        same = (plan.draft, plan.version, plan.quiet) == (current.draft, current.version, current.quiet)
        if same and plan != current:
            raise Conflict(f"version {plan.version} is in force with other content", param="version")

    def task(self, header: str | None, metadata: str | None, prompt: str) -> str:
        """Return the task label of a request: from the header, else the metadata, else the first rule that matches.

        The header is specific to specdecode, so a label that the plan does not know becomes ``other``. The key in the
        metadata may have another meaning for the client, so an unknown value there is ignored.
        """
        names = {task.name for task in self.current.tasks}
        if header is not None:
            return header if header in names else OTHER_TASK
        if metadata in names:
            return metadata
        matching = (task.name for task in self.current.tasks if task.match and task.match in prompt)
        return next(matching, OTHER_TASK)


def parse_plan(body: bytes) -> Plan:
    """Parse and validate a plan. Raises BadRequest that names the field at fault."""
    return parse_contract(Plan, body)


def read_plan(path: Path, uid: str) -> Plan | None:
    """Read the plan mounted from the ConfigMap.

    Returns:
        The plan, or None if it is missing, unreadable or made for another uid. The worker then serves without
        speculation.
    """
    try:
        plan = Plan.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        log.error("the plan in %s cannot be used: %s", path, error)
        return None
    if plan.uid != uid:
        log.error("the plan in %s is for uid %r, this worker belongs to %r", path, plan.uid, uid)
        return None
    return plan
