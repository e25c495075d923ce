"""Decisions that are not carried out yet, after a reconcile."""

from __future__ import annotations

import pytest

from specdecode_operator.api.v1alpha1 import Decision
from specdecode_operator.state.deployment_state import Pending


def decision(after: str) -> Decision:
    return Decision(time="2026-11-25T09:00:00Z", kind="Draft", load="drafts", before="a", after=after, reason="r")


OLD, NEW = decision("old"), decision("new")


@pytest.mark.parametrize(("is_saved", "urgent"), [(True, False), (False, True)])
def test_nothing_is_left_but_what_was_not_saved(is_saved: bool, urgent: bool) -> None:
    done = Pending(urgent=True, learnt=True, changes=(OLD,))
    assert done.after(done, is_saved=is_saved) == Pending(urgent=urgent)


def test_decisions_that_were_added_meanwhile_are_left_without_those_that_have_an_event() -> None:
    done = Pending(urgent=True, changes=(OLD,))
    grown = Pending(urgent=True, learnt=True, changes=(OLD, NEW))
    assert grown.after(done, is_saved=True) == Pending(urgent=True, learnt=True, changes=(NEW,))


def test_other_decisions_stay() -> None:
    assert Pending(changes=(NEW,)).after(Pending(changes=(OLD,)), is_saved=True).changes == (NEW,)
