"""Copy heads attend to what followed earlier occurrences of the text, start with zero output and run in the engine."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from specdecode_worker.models.causal_lm import CausalLM
from specdecode_worker.models.eagle import Eagle3Head
from specdecode_worker.training.acceptance import target_token_ranks
from specdecode_worker.training.conversations import Conversation
from specdecode_worker.training.copy_attention import add_copy_heads
from specdecode_worker.training.errors import DraftNotTrainable
from specdecode_worker.training.heads import new_head
from specdecode_worker.training.rollout import read_states
from specdecode_worker.training.unroll import UnrolledAttention

PERIOD = 20


@pytest.fixture
def wide(target: CausalLM) -> CausalLM:
    """Return a target that is wide enough to distinguish its tokens in a few dimensions."""
    torch.manual_seed(0)
    config = replace(
        target.config,
        vocab_size=96,
        hidden_size=64,
        intermediate_size=64,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        rope_theta=100000.0,
    )
    return CausalLM(config).requires_grad_(False)


def conversation_of(target: CausalLM, tokens: Tensor) -> Conversation:
    """Return ``tokens`` as a conversation with the target's states."""
    return Conversation(tokens.int(), *read_states(target, tokens), answer_start=1, temperature=0.0, domain="code")


@pytest.fixture
def recorded(wide: CausalLM) -> list[Conversation]:
    generator = torch.Generator().manual_seed(1)
    return [conversation_of(wide, torch.randint(1, 96, (60,), generator=generator)) for _ in range(40)]


class Weights(UnrolledAttention):
    """Attention that stores the attention weights of the last query head."""

    seen_LL: Tensor

    def __call__(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        scores_LL = q_THD[:, -1] @ k_TKD[:, -1].T / q_THD.shape[-1] ** 0.5
        hidden = torch.ones_like(scores_LL, dtype=torch.bool).triu(1)
        self.seen_LL = scores_LL.masked_fill(hidden, float("-inf")).softmax(dim=-1)
        return super().__call__(layer, q_THD, k_TKD, v_TKD)


def attention_weights(head: Eagle3Head, text: Conversation) -> Tensor:
    """Return the attention weights of the last query head, [slots, slots]. Slot s holds token s + 1."""
    tokens_L = text.tokens_N[1:].long()
    attend = Weights(torch.arange(len(tokens_L))[None])
    head(head.fuse(text.aux_NA[:-1].float()), tokens_L, torch.arange(len(tokens_L)) + 1, attend)
    return attend.seen_LL


@pytest.mark.parametrize("groups", [1, 2])
def test_copy_heads_attend_to_the_token_after_the_earlier_occurrence(
    wide: CausalLM, recorded: list[Conversation], groups: int
) -> None:
    head = add_copy_heads(new_head(wide, torch.arange(96)), wide, recorded, groups)
    generator = torch.Generator().manual_seed(5)
    right = total = 0
    for _ in range(5):
        once = torch.randperm(95, generator=generator)[:PERIOD] + 1
        with torch.no_grad():
            weights_LL = attention_weights(head, conversation_of(wide, torch.cat((once, once))))
        for slot in range(PERIOD, 2 * PERIOD - 1):
            right += int(weights_LL[slot].argmax()) == slot - PERIOD + 1
            total += 1
    assert right > 0.8 * total


def test_copy_heads_attend_weakly_without_repetition(wide: CausalLM, recorded: list[Conversation]) -> None:
    head = add_copy_heads(new_head(wide, torch.arange(96)), wide, recorded, 1)
    once = torch.randperm(95, generator=torch.Generator().manual_seed(6))[: 2 * PERIOD] + 1
    twice = torch.cat((once[:PERIOD], once[:PERIOD]))
    with torch.no_grad():
        new, again = (
            attention_weights(head, conversation_of(wide, tokens))[PERIOD:-1].max(dim=-1).values.mean()
            for tokens in (once, twice)
        )
    assert again > 1.5 * new


def test_new_copy_heads_have_zero_output(wide: CausalLM, recorded: list[Conversation]) -> None:
    """The output of copy heads starts at zero: drafts change only through the replaced directions of the state."""
    head = new_head(wide, torch.arange(96))
    wider = add_copy_heads(head, wide, recorded, 2)
    assert (wider.config.num_attention_heads, wider.config.num_key_value_heads) == (6, 3)
    output = wider.midlayer.self_attn.o_proj.weight
    assert torch.equal(output[:, :64], head.midlayer.self_attn.o_proj.weight)
    assert not output[:, 64:].any()
    before, after = (torch.cat(target_token_ranks(one, recorded[:6], wide.lm_head.weight, 2)) for one in (head, wider))
    assert (before == after).float().mean() > 0.5


def test_copy_heads_can_be_added_twice(wide: CausalLM, recorded: list[Conversation]) -> None:
    once = add_copy_heads(new_head(wide, torch.arange(96)), wide, recorded, 1)
    assert add_copy_heads(once, wide, recorded, 1).config.num_key_value_heads == 3


def test_unsupported_head_is_refused_with_the_reason(wide: CausalLM, recorded: list[Conversation]) -> None:
    head = new_head(wide, torch.arange(96))
    with pytest.raises(DraftNotTrainable, match="recorded text"):
        add_copy_heads(head, wide, [], 1)
    head.config = replace(head.config, qk_norm=True)
    with pytest.raises(DraftNotTrainable, match=r"norms of its queries; leave --copiers out"):
        add_copy_heads(head, wide, recorded, 1)
