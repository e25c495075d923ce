"""The planner loop: makes a decision when measurements or the resource of a deployment change. No I/O."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from specdecode_operator.controller.caches import Caches
from specdecode_operator.controller.observation import observe
from specdecode_operator.controller.resource import deployment_of, identity_of
from specdecode_operator.decision.decide import decide
from specdecode_operator.errors import SpecError
from specdecode_operator.state.deployment_state import DeploymentState, Failure, Pending, StateTable
from specdecode_operator.state.packed import Packed
from specdecode_operator.state.session import PackedSession
from specdecode_operator.types import Decision, Defaults, Key

log = logging.getLogger(__name__)


class Planner:
    """Handler of the planning queue. It writes ``session``, ``decision`` and ``failure`` of the deployment states."""

    def __init__(
        self,
        table: StateTable,
        caches: Caches,
        defaults: Defaults,
        *,
        decided: Callable[[Key, bool], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._table = table
        self._caches = caches
        self._defaults = defaults
        self._decided = decided
        self._clock = clock

    async def handle(self, key: Key) -> None:
        """Make a decision for one deployment and request a reconcile, with priority after a change by a user."""
        state = self._table.get(key)
        changed = False
        if state is not None and state.session is not None:
            resource = state.resource.value
            changed = state.decided != identity_of(resource["metadata"])
            self._tick(key, state, resource)
        self._decided(key, changed)

    def _tick(self, key: Key, state: DeploymentState, resource: Mapping[str, Any]) -> None:
        """Make a decision for one deployment.

        A spec that cannot be carried out, or an internal error, is written into ``failure``. The reconciler then shows
        it in status and leaves the children as they are.
        """
        assert state.session is not None, "a decision needs the loaded state"
        try:
            deployment = deployment_of(resource)
            observed = observe(key, self._caches, state.readings, state.session.session)
            decision, session = decide(deployment, observed, self._defaults, now=self._clock())
        except SpecError as error:
            self._fail(key, state, "SpecRefused", str(error))
        except Exception as error:
            log.exception("%s/%s: the decision failed", *key)
            self._fail(key, state, "InternalError", f"{type(error).__name__}: {error}; please report this")
        else:
            self._table.update(
                key,
                session=PackedSession.of(replace(session, stored=True), state.session),
                decision=Packed.of(decision),
                decided=identity_of(resource["metadata"]),
                pending=_added(state.pending, decision),
                failure=None,
            )

    def _fail(self, key: Key, state: DeploymentState, reason: str, message: str) -> None:
        self._table.update(key, failure=Failure(state.generation, reason, message))


def _added(pending: Pending, decision: Decision) -> Pending:
    """Add a decision to the pending ones, because the reconciler may see only the latest decision."""
    return Pending(
        urgent=pending.urgent or decision.urgent,
        learnt=pending.learnt or decision.learnt,
        changes=(*pending.changes, *decision.changes),
    )
