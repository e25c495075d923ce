"""Drafts of every method: the unrolled pass equals drafting token by token, and training reduces the loss."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from specdecode_worker.models.causal_lm import CausalLM
from specdecode_worker.models.dflash import DFlashHead
from specdecode_worker.models.drafts import Draft
from specdecode_worker.models.eagle import Eagle3Head, EagleHead, PEagleHead
from specdecode_worker.models.medusa import MedusaHeads
from specdecode_worker.training.conversations import Conversation, DataSet, write_shard
from specdecode_worker.training.heads import new_draft_model, new_eagle, new_head, new_medusa
from specdecode_worker.training.rollout import read_states
from specdecode_worker.training.trainer import LossSettings, Trainer, TrainSettings, loss_of
from specdecode_worker.training.unroll import (
    batch_for,
    logits_of,
    unrolled,
    vocabulary_of,
    working_copy,
)
from support.training_fixtures import MAKERS, Growing, shaken

DEPTH = 3


def stepped(draft: Draft, conversation: Conversation, root: int) -> list[Tensor]:
    """Return the logits by depth of a chain from slot ``root``, fed with the text's own tokens."""
    tokens, end = conversation.tokens_N.long(), min(root + DEPTH, len(conversation.tokens_N))
    if isinstance(draft, MedusaHeads):
        return list(draft.logits(conversation.hidden_NE[root - 1 : root]).flatten(0, 1)[: end - root])
    if isinstance(draft, DFlashHead):
        return block_logits(draft, conversation, root)[: end - root]
    if isinstance(draft, CausalLM):
        return [draft.logits(read_states(draft, tokens[: slot + 1])[1][-1]) for slot in range(root, end)]
    attend, slots = Growing(), torch.arange(1, root + 1)
    read = conversation.hidden_NE if draft.reads.final else conversation.aux_NA
    state = draft(draft.fuse(read[slots - 1]), tokens[slots], slots, attend)[-1:]
    logits = [draft.logits(state)[0]]
    if isinstance(draft, PEagleHead):
        tokens, state = torch.full_like(tokens, draft.config.mask_token_id), draft.mask_state
    for slot in range(root + 1, end):
        state = draft(
            draft.mask_state if isinstance(draft, PEagleHead) else state,
            tokens[slot : slot + 1],
            torch.tensor([slot]),
            attend,
        )
        logits.append(draft.logits(state)[0])
    return logits


def block_logits(head: DFlashHead, conversation: Conversation, root: int) -> list[Tensor]:
    """Return the logits by depth of one block behind the token ``root``."""
    context = head.context(conversation.aux_NA[:root], torch.arange(root))
    mask = torch.full((DEPTH,), head.config.mask_token_id)
    tokens = torch.cat((conversation.tokens_N[root : root + 1].long(), mask))

    def attend(layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        k, v = (torch.cat(pair).transpose(0, 1)[None] for pair in zip(context[layer], (k_TKD, v_TKD), strict=True))
        return F.scaled_dot_product_attention(q_THD.transpose(0, 1)[None], k, v, enable_gqa=True)[0].transpose(0, 1)

    states = head(tokens, root + torch.arange(DEPTH + 1), attend)
    return list(head.logits(states[1:]))


@pytest.mark.parametrize("method", MAKERS)
@torch.no_grad()
def test_unrolled_draft_equals_drafting_step_by_step(
    method: str, target: CausalLM, conversations: list[Conversation]
) -> None:
    draft = shaken(MAKERS[method](target, DEPTH))
    passes = list(unrolled(draft, batch_for(draft, conversations, torch.float32), DEPTH))
    for row, conversation in enumerate(conversations[:3]):
        for root in range(conversation.answer_start, len(conversation.tokens_N)):
            for k, expected in enumerate(stepped(draft, conversation, root)):
                at = root + k - conversation.answer_start
                state_BAE, rooted_BA = passes[k]
                assert rooted_BA[row, at]
                torch.testing.assert_close(logits_of(draft, state_BAE[row, at], k), expected, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("method", MAKERS)
def test_loss_falls_for_every_method(
    method: str, target: CausalLM, conversations: list[Conversation], tmp_path: Path
) -> None:
    write_shard(tmp_path, 0, conversations * 4)
    settings = TrainSettings(
        steps=40, learning_rate=3e-3, output_rate=1.0, batch_tokens=60, depth=DEPTH, deepen_at=(), mix=((1.0, 1.0),)
    )
    draft = shaken(MAKERS[method](target, DEPTH))
    run = Trainer(draft, target.lm_head.weight, DataSet(tmp_path, validation=1), settings)
    aim = LossSettings(depth=DEPTH, decay=0.8, divergence=0.5)

    def measured() -> float:
        return float(loss_of(run.head, batch_for(run.head, conversations, torch.float32), run.output_VE, aim).detach())

    before = measured()
    for batch in run._batches():
        run.step(batch)
        if run.progress.step == 40:
            break
    assert measured() < 0.95 * before
    assert "tokens_per_step" in run.validate(0.0)


def test_working_copy_shares_the_target_weights(target: CausalLM) -> None:
    eagle3, eagle = new_head(target, torch.arange(64)), new_eagle(target)
    copies = working_copy(eagle3, torch.bfloat16), working_copy(eagle, torch.bfloat16)
    assert isinstance(copies[0], Eagle3Head)
    assert isinstance(copies[1], EagleHead)
    assert copies[0]._shared_embedding[0] is target.model.embed_tokens
    assert copies[1]._target[0] is target
    assert target.lm_head.weight.dtype == torch.float32
    assert not any(parameter.requires_grad for parameter in target.parameters())


def test_medusa_draft_uses_its_own_vocabulary(target: CausalLM) -> None:
    assert vocabulary_of(new_medusa(target, torch.arange(0, 64, 4), 2), 64).tolist() == list(range(0, 64, 4))
    assert vocabulary_of(new_draft_model(target, 2), 64).tolist() == list(range(64))
