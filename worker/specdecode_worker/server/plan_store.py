"""The plan in force: read from the mounted file at start, replaced by pushes, asked for task labels."""

from __future__ import annotations

import logging
from pathlib import Path

from pydantic import ValidationError

from specdecode_worker.contract import OTHER_TASK, Plan
from specdecode_worker.server.errors import Conflict
from specdecode_worker.server.requests.body_parser import parse_contract

log = logging.getLogger(__name__)


class Plans:
    """Which plan may follow which: same uid, and within one draft the version never falls. A version has one content
    for all workers, and one for those that shall be quiet."""

    def __init__(self, uid: str, start: Plan) -> None:
        self._uid = uid
        self.current = start

    def check(self, plan: Plan) -> None:
        """Raises Conflict when ``plan`` must not replace the current one."""
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
        """The label of a request: the header's, else the one in its metadata, else the first rule that matches.

        The header is ours, so one that the plan does not know is ``other``; in metadata the word may mean anything.
        """
        names = {task.name for task in self.current.tasks}
        if header is not None:
            return header if header in names else OTHER_TASK
        if metadata in names:
            return metadata
        matching = (task.name for task in self.current.tasks if task.match and task.match in prompt)
        return next(matching, OTHER_TASK)


def parse_plan(body: bytes) -> Plan:
    """Raises BadRequest that names the field."""
    return parse_contract(Plan, body)


def read_plan(path: Path, uid: str) -> Plan | None:
    """The mounted plan; None when there is none that can be used, for a worker without a plan serves, plainly."""
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
