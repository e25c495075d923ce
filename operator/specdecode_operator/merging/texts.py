"""Sentences about merged drafts, as status, `explain` and the history show them. Pure."""

from __future__ import annotations

from specdecode_operator.merging.subsets import Credit, Names
from specdecode_operator.state.learned import MergeChoice


def listed(names: Names) -> str:
    """Return names in one phrase."""
    *first, last = names or ("nothing",)
    return f"{', '.join(first)} and {last}" if first else last


def merge_text(names: Names, *, is_trial: bool) -> str:
    """Return the drafts as the history shows them before and after a change."""
    return f"merge {', '.join(names) or 'nothing'}{' on trial' if is_trial else ''}"


def gain_text(names: Names, verb: str, tokens_ratio: float, seconds_ratio: float, confidence: float) -> str:
    """Return the tokens and the time that drafts bring, by those of a step without them over those with them."""
    tokens, seconds = 100 * (1 / tokens_ratio - 1), 100 * (1 / seconds_ratio - 1)
    length = "longer" if seconds >= 0 else "shorter"
    return (
        f"{listed(names)} {verb}: {tokens:+.0f} % tokens for {abs(seconds):.0f} % {length} steps,"
        f" {100 * confidence:.0f} % sure"
    )


def task_text(choice: MergeChoice, credit: Credit) -> str:
    """Return the drafts that a task merges, with their credit, and why others are left out."""
    text = f"merges {listed(choice.drafts)}"
    if choice.before is not None:
        tried = tuple(name for name in choice.drafts if name not in choice.before)
        return f"{text}; {listed(tried)} on trial"
    if choice.drafts and credit.common:
        text += f" (credit {100 * credit.share_of_accepted(choice.drafts):.0f} % of accepted tokens)"
    elif choice.drafts:
        text += " (credit not measured yet)"
    return f"{text}; {choice.reason}" if choice.reason else text
