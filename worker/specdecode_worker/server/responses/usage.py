"""Usage and speculation statistics over all choices of one request."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from specdecode_worker.server.responses.objects import Statistics


def usage(statistics: Iterable[Statistics]) -> dict[str, Any]:
    """Return OpenAI's usage object."""
    per_choice = list(statistics)
    once = [s for s in per_choice if s.counts_prompt]
    prompt, completion = sum(s.prompt_tokens for s in once), sum(s.completion_tokens for s in per_choice)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(s.cached_tokens for s in once)},
    }


def metrics(statistics: Iterable[Statistics]) -> dict[str, Any]:
    """Return the speculation statistics of the request under vLLM's names."""
    per_choice = list(statistics)
    drafts, accepted = sum(s.drafts for s in per_choice), sum(s.accepted for s in per_choice)
    draft_tokens = sum(s.draft_tokens for s in per_choice)
    return {
        "speculative_decoding": {
            "mean_acceptance_length": 1 + accepted / drafts if drafts else 1.0,
            "draft_acceptance_rate": accepted / draft_tokens if draft_tokens else 0.0,
            "num_drafts": drafts,
            "num_draft_tokens": draft_tokens,
            "num_accepted_tokens": accepted,
        }
    }
