"""Verdict on a memory budget for users: the arithmetic line by line, what does not fit, and what to change."""

from __future__ import annotations

import logging

from specdecode_worker.contract import CheckVerdict, MemoryState
from specdecode_worker.engine.memory.memory_budget import (
    LARGE_DRAFT,
    SLACK_TOKENS,
    SMALL_DRAFT_PARAMETERS,
    Budget,
    kv_cache_bytes,
    kv_tokens,
)
from specdecode_worker.engine.memory.model_inventory import Inventory
from specdecode_worker.models.errors import CannotServe

log = logging.getLogger(__name__)

MAX_WARNINGS = 8
"""Most warnings of a verdict; its contract takes no more."""
_GIB = 2**30


def make_verdict(inventory: Inventory) -> CheckVerdict:
    """Return the verdict on a worker's configuration. Problems are part of the verdict and never raised."""
    budget = inventory.budget
    return CheckVerdict(
        serves=budget.fits and not (inventory.draft_problem and inventory.draft_required),
        fits=budget.fits,
        problem="" if budget.fits else f"{shortfall(budget)}; {remedies(budget)}"[:1000],
        arithmetic=tuple(arithmetic(budget)),
        memory=memory_state(budget),
        kv_tokens=kv_tokens(budget) if budget.fits else budget.room_tokens,
        max_model_len=budget.bounds.max_model_len,
        sequences=budget.sequences,
        draft_problem=inventory.draft_problem and inventory.draft_problem[:1000],
        warnings=tuple(warnings(budget)[:MAX_WARNINGS]),
    )


def require_servable(inventory: Inventory) -> None:
    """Check that the configuration can be served, and log warnings.

    Raises:
        CannotServe: The memory does not suffice, or a required draft does not fit the target.
    """
    verdict = make_verdict(inventory)
    if not verdict.serves:
        raise CannotServe(verdict)
    for warning in verdict.warnings:
        log.warning(warning)


def memory_state(budget: Budget) -> MemoryState:
    """Return the main figures of the budget for the report, in bytes."""
    return MemoryState(
        limit=budget.device.limit,
        weights=budget.target.weights,
        drafts=budget.draft_weights,
        kv_cache=kv_cache_bytes(budget, kv_tokens(budget)) if budget.fits else 0,
        reserve=budget.reserve,
    )


def arithmetic(budget: Budget) -> list[str]:
    """Return the calculation from the memory limit down to tokens of cache, one line per term."""
    lines = [_line(_limit(budget), budget.device.limit)]
    lines += [_line(f"- {what}", -size) for what, size in _terms(budget)]
    lines.append(_line("= for keys and values", budget.kv_bytes_left))
    lines.append(f"{'/ bytes per block of 16 tokens ' + _per_token(budget):62}{budget.bytes_per_block:>13,} B")
    lines.append(f"{'= tokens of keys and values that there is room for':62}{budget.room_tokens:>13,}")
    length = budget.bounds.max_model_len
    lines.append(f"{f'  one sequence of {length:,} tokens needs':62}{length + SLACK_TOKENS:>13,}")
    return lines


def shortfall(budget: Budget) -> str:
    """Return one sentence on what does not fit."""
    what, bounds = _limit(budget), budget.bounds
    if budget.kv_bytes_left <= 0:
        short = _gib(-budget.kv_bytes_left)
        return f"the {what} of {_gib(budget.device.limit)} leaves no room for keys and values: {short} short"
    room = f"the {what} of {_gib(budget.device.limit)} leaves room for {budget.room_tokens:,} tokens of keys and values"
    if bounds.kv_cache_tokens:
        return f"{room}, kv_cache_tokens asks for {bounds.kv_cache_tokens:,}"
    return f"{room}, one sequence of max_model_len {bounds.max_model_len:,} needs {budget.min_tokens:,}"


def remedies(budget: Budget) -> str:
    """Return the changes that a user can make, the least costly first, named as in flags and the resource."""
    bounds, changes = budget.bounds, []
    if bounds.kv_cache_tokens and budget.room_tokens:
        changes.append(f"set kv_cache_tokens to at most {budget.room_tokens}")
    elif budget.max_fitting_model_len:
        changes.append(f"set max_model_len to at most {budget.max_fitting_model_len}")
    if budget.occupied:
        changes.append(f"free the {_gib(budget.occupied)} that others use")
    if bounds.max_num_seqs > 1:
        changes.append(f"lower max_num_seqs ({bounds.max_num_seqs})")
    if budget.drafts:
        changes.append(f"serve without the draft ({_gib(budget.draft_weights)})")
    if bounds.dtype_bytes > 2:
        changes.append("set dtype to bfloat16")
    changes.append("give it more memory" if budget.device.kind == "cpu" else "take a larger GPU, or more of them")
    return ", or ".join(changes)


def warnings(budget: Budget) -> list[str]:
    """Return warnings about configurations that fit but are unlikely to perform well."""
    messages = []
    for draft in budget.drafts:
        share = draft.weights / max(budget.target.weights, 1)
        if share > LARGE_DRAFT:
            messages.append(
                f"the {draft.name}'s weights are {share:.0%} of the target's; beyond {LARGE_DRAFT:.0%} a draft usually"
                " costs more than it brings"
            )
        parameters = draft.separate_draft_parameters
        if parameters is not None and parameters < SMALL_DRAFT_PARAMETERS:
            messages.append(
                f"the {draft.name} is a model of its own with {parameters / 1e6:.1f}M parameters; below"
                f" {SMALL_DRAFT_PARAMETERS / 1e6:.0f}M such a draft usually does not pay, so measure it with"
                " `specdecode-worker bench`, or train an EAGLE-3 head"
            )
    return messages


def _terms(budget: Budget) -> list[tuple[str, int]]:
    """Return the (name, bytes) of everything that is subtracted from the limit."""
    reserve = f"reserve of {1 - budget.bounds.utilization:.0%}"
    terms = [(reserve, budget.reserve)]
    if budget.occupied:
        terms.append(("in use by others", budget.occupied))
    terms.append(("Python and torch" if budget.device.kind == "cpu" else "CUDA context", budget.runtime))
    terms.append((_shared("weights of the target", budget.device.count), budget.target.weights))
    terms += [(f"weights of the {draft.name}", draft.weights) for draft in budget.drafts]
    terms.append((f"tables and state of {budget.bounds.max_num_seqs} sequences", budget.state))
    terms.append((f"activations of a step of {budget.bounds.max_num_batched_tokens} tokens", budget.activations))
    if budget.device.kind == "cuda":
        captured = f"of up to {budget.bounds.graph_rows} sequences" if budget.graphs else "(none are captured)"
        terms.append((f"CUDA graphs {captured}", budget.graphs))
    return terms


def _limit(budget: Budget) -> str:
    return budget.device.source


def _shared(what: str, count: int) -> str:
    return what if count == 1 else f"{what}, its share of {count} devices"


def _per_token(budget: Budget) -> str:
    size = budget.bounds.dtype_bytes
    parts = [f"{network.name} {network.kv_bytes_per_token(size):,}" for network in (budget.target, *budget.drafts)]
    return f"({', '.join(parts)} a token)"


def _line(what: str, size: int) -> str:
    return f"{what:62}{size / _GIB:>11.2f} GiB"


def _gib(size: int) -> str:
    return f"{size / _GIB:.2f} GiB"
