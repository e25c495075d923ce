"""Rules in force, as all threads of the capture read them."""

from __future__ import annotations

from dataclasses import dataclass

from specdecode_worker.capture.record import Record
from specdecode_worker.contract.capture import CaptureRules


@dataclass(frozen=True, slots=True)
class RulesState:
    """Rules in force; None switches capture off.

    ``epoch`` counts how often capture was switched off. Requests that began in an earlier epoch are not captured.
    """

    rules: CaptureRules | None
    epoch: int

    def forbids(self, record: Record, epoch: int) -> bool:
        """Return whether the record of a request that began in ``epoch`` must not be stored."""
        rules = self.rules
        return (
            rules is None
            or epoch != self.epoch
            or record.time_seconds < rules.delete_before
            or (rules.consent == "OptIn" and not record.permitted)
        )


class CurrentRules:
    """Holder of the state, which is replaced as a whole. Only the event loop replaces it."""

    def __init__(self, rules: CaptureRules | None) -> None:
        self.state = RulesState(rules, epoch=0 if rules is not None else 1)

    def replace(self, rules: CaptureRules | None) -> bool:
        """Replace the rules. Return False if they are the same."""
        state = self.state
        if rules == state.rules:
            return False
        self.state = RulesState(rules, state.epoch + (rules is None))
        return True
