"""The draft vocabulary is chosen for the domain that it covers worst."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from specdecode_worker.models.causal_lm import CausalLM
from specdecode_worker.training.conversations import (
    Conversation,
    choose,
    domain_probabilities,
    shard_paths,
    uncovered,
    write_shard,
)


def test_domain_probabilities_are_the_mean_target_probabilities(
    target: CausalLM, conversations: list[Conversation], tmp_path: Path
) -> None:
    write_shard(tmp_path, 0, conversations)
    probabilities = domain_probabilities(shard_paths(tmp_path), target.lm_head.weight, every=1)
    assert list(probabilities) == ["code", "prose"]
    for domain, mass_V in probabilities.items():
        mine = [c.hidden_NE[c.answer_start :] for c in conversations if c.domain == domain]
        expected = torch.softmax(target.logits(torch.cat(mine)), dim=-1).mean(dim=0).double()
        torch.testing.assert_close(mass_V, expected, atol=1e-6, rtol=1e-4)


def test_vocabulary_choice_covers_a_rare_domain() -> None:
    # Eight domains share their tokens. The ninth has tokens of its own, which a choice by the mean leaves out.
    common, special = torch.zeros(400, dtype=torch.float64), torch.zeros(400, dtype=torch.float64)
    common[:200], special[200:] = 1 / torch.arange(1, 201), 1 / torch.arange(1, 201)
    probabilities_by_domain = {f"common {i}": common / common.sum() for i in range(8)} | {
        "special": special / special.sum()
    }
    by_mean = torch.stack(list(probabilities_by_domain.values())).mean(dim=0).topk(100).indices
    chosen = choose(probabilities_by_domain, 100)
    assert chosen.tolist() == sorted(set(chosen.tolist()))
    assert len(chosen) == 100
    after, before = uncovered(probabilities_by_domain, chosen), uncovered(probabilities_by_domain, by_mean)
    assert max(before.values()) > 0.4
    # The fair choice gives half of the vocabulary to each of the two sets of tokens.
    fair = 1 - float((common / common.sum())[:50].sum())
    assert max(after.values()) == pytest.approx(fair, abs=0.02)
