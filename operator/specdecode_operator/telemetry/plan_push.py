"""Rule for pushes: which workers need which plan. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from specdecode_operator.state.deployment_state import Published
from specdecode_worker.contract import Plan, Report


class RunningPlan(NamedTuple):
    """Plan that a worker runs, as its report says."""

    uid: str
    version: int
    quiet: bool

    @classmethod
    def of(cls, report: Report) -> RunningPlan:
        return cls(report.plan.uid, report.plan.version, report.plan.quiet)


def needs_plan(running: RunningPlan, uid: str, version: int, *, quiet: bool) -> bool:
    """Return whether a worker must be given the plan.

    Args:
        running: The plan that the worker runs.
        uid: uid of the deployment.
        version: Version of the plan.
        quiet: Whether it is the plan of a worker that must not speculate. It has the version of the common plan.
    """
    return running.uid != uid or running.version < version or running.quiet != quiet


def plans_to_push(published: Published, running: Mapping[str, RunningPlan]) -> dict[str, Plan]:
    """Return the plans to push, by address.

    Args:
        published: Plans that are persisted.
        running: Plans that workers run, by address, from the reports of this round.
    """
    common = [
        address
        for address, plan in running.items()
        if address not in published.excluded
        and address not in published.own
        and needs_plan(plan, published.uid, published.version, quiet=False)
    ]
    plans = dict.fromkeys(common, published.plan.value) if common else {}
    for address, packed in published.own.items():
        own = packed.value
        plan = running.get(address)
        # A newer version than the published one is not persisted yet.
        if (
            plan is not None
            and own.version <= published.version
            and needs_plan(plan, published.uid, own.version, quiet=own.quiet)
        ):
            plans[address] = own
    return plans
