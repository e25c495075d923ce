"""Evaluation of a candidate draft: step counts on all test texts, paired step times, and the verdict document."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from specdecode_worker.contract import TreeShape
from specdecode_worker.models.networks.llama import Llama
from specdecode_worker.training.distillation.record_shards import Interrupted, Stopped
from specdecode_worker.training.evaluation.domain_pools import PooledDomains, pool_small_domains
from specdecode_worker.training.evaluation.draft_verdict import Domain, Gain, StepCosts, Verdict, compute_verdict
from specdecode_worker.training.evaluation.golden_set import by_conversation
from specdecode_worker.training.evaluation.paired_step_times import step_costs
from specdecode_worker.training.evaluation.paired_steps import CalibratedDraft, Sample, count_steps


@dataclass(frozen=True, slots=True)
class Comparison:
    """Drafts to compare and the texts to compare them on.

    ``weights`` are the traffic's shares by captured domain. Domains without a weight are golden ones.
    """

    deployed: CalibratedDraft
    candidate: CalibratedDraft
    samples: Sequence[Sample]
    weights: Mapping[str, float]
    shape: TreeShape
    wanted_gain: float
    seed: int = 0


def compare_drafts(
    target: Llama, comparison: Comparison, log: Callable[[str], None], stopped: Stopped
) -> dict[str, Any]:
    """Compare the two drafts and return the document of the verdict.

    Raises:
        Interrupted: ``stopped`` returned True.
    """
    domains = _count_domain_steps(target, comparison, log, stopped)
    missing = [name for name in comparison.weights if name not in {domain.name for domain in domains}]
    nothing = np.empty(0)
    domains += [Domain(name, comparison.weights[name], nothing, nothing, nothing) for name in missing]
    costs = step_costs(target, comparison.deployed.head, comparison.candidate.head, comparison.shape)
    pooled = pool_small_domains(domains)
    verdict = compute_verdict(pooled.domains, costs, wanted_gain=comparison.wanted_gain, seed=comparison.seed)
    return _document(verdict, domains, pooled, costs, comparison)


def _count_domain_steps(
    target: Llama, comparison: Comparison, log: Callable[[str], None], stopped: Stopped
) -> list[Domain]:
    """Return the token and step counts of both drafts by domain."""
    domains = []
    config = target.config
    for name, conversations in sorted(by_conversation(comparison.samples).items()):
        sums = []
        for samples in conversations.values():
            if stopped():
                raise Interrupted
            pairs = [
                count_steps(
                    (comparison.deployed, comparison.candidate),
                    sample,
                    comparison.shape,
                    config.eos_token_ids,
                    config.vocab_size,
                )
                for sample in samples
            ]
            sums.append([sum(a.tokens for a, _ in pairs), *(sum(pair[i].steps for pair in pairs) for i in (0, 1))])
        tokens_C, deployed_C, candidate_C = np.array(sums, np.float64).T
        domains.append(Domain(name, comparison.weights.get(name, 0.0), tokens_C, deployed_C, candidate_C))
        log(f"distill: {name}: {len(sums)} conversations walked with both drafts")
    return domains


def _document(
    verdict: Verdict, domains: Sequence[Domain], pooled: PooledDomains, costs: StepCosts, comparison: Comparison
) -> dict[str, Any]:
    """Return the content of verdict.json. A pooled domain has counts of its own, and the gain of its pool only."""
    return {
        "verdict": verdict.finding,
        "exit_code": verdict.exit_code,
        "reasons": list(verdict.reasons),
        "wanted_gain": comparison.wanted_gain,
        "gain": _gain(verdict.mix),
        "domains": {domain.name: _domain(domain, verdict.domains.get(domain.name)) for domain in domains},
        "pools": {
            name: {"domains": list(members), "gain": _gain(verdict.domains.get(name))}
            for name, members in pooled.members.items()
        },
        "shape": str(comparison.shape),
        "step_milliseconds": {
            "deployed": round(float(np.median(costs.deployed_R)) * 1e3, 3),
            "candidate": round(float(np.median(costs.candidate_R)) * 1e3, 3),
            "rounds": len(costs.deployed_R),
        },
    }


def _domain(domain: Domain, gain: Gain | None) -> dict[str, Any]:
    tokens = domain.tokens_C.sum()
    steps_by_draft = {"deployed": domain.deployed_C, "candidate": domain.candidate_C}
    return {
        "kind": "captured" if domain.weight > 0 else "golden",
        "share_of_traffic": round(domain.weight, 4),
        "conversations": len(domain.tokens_C),
        "tokens": int(tokens),
        "tokens_per_step": {
            name: round(float(tokens / max(steps.sum(), 1)), 4) for name, steps in steps_by_draft.items()
        },
        "gain": _gain(gain),
    }


def _gain(gain: Gain | None) -> dict[str, float] | None:
    if gain is None:
        return None
    return {"estimate": round(gain.estimate, 5), "lower": round(gain.lower, 5), "upper": round(gain.upper, 5)}
