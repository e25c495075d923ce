"""Replay reproduces the engine's text for all sampling parameters and no other text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
import torch

from specdecode_worker.capture import Record
from specdecode_worker.contract import TreeShape
from specdecode_worker.models.causal_lm import CausalLM
from specdecode_worker.models.weights import load_head, prepare_eagle3
from specdecode_worker.training.evaluation import CalibratedDraft, Sample, count_steps
from specdecode_worker.training.replay import (
    TIE_LOGITS,
    DropReason,
    Replayed,
    near_ties,
    replay,
    static_drop_reason,
)
from support.worker.serving_records import SAMPLING_PARAMS

pytestmark = pytest.mark.slow

SIZE, POSITIONS = 258, 256


def changed(record: Record, **sampling: object) -> Record:
    return msgspec.structs.replace(record, sampling=msgspec.structs.replace(record.sampling, **sampling))


def test_replay_reproduces_engine_records(target: CausalLM, records: Sequence[Record]) -> None:
    for record in records[:30]:
        replayed = replay(target, record)
        assert isinstance(replayed, Replayed), record.sampling
        conversation = replayed.conversation
        assert conversation.tokens_N.tolist() == list(record.tokens[:-1])
        assert (conversation.answer_start, conversation.domain) == (record.prompt_length, record.task)
        assert conversation.temperature == record.sampling.temperature


@pytest.mark.parametrize("sampling_params", range(len(SAMPLING_PARAMS)))
def test_one_changed_token_is_not_reproduced(sampling_params: int, target: CausalLM, records: Sequence[Record]) -> None:
    record = records[sampling_params]
    for place in (0, record.output_length // 2, record.output_length - 1):
        tokens = list(record.tokens)
        tokens[record.prompt_length + place] = (tokens[record.prompt_length + place] + 101) % 250
        spoiled = msgspec.structs.replace(record, tokens=tuple(tokens))
        assert replay(target, spoiled) == DropReason.not_reproduced, place


@pytest.mark.parametrize("sampling", [{"seed": 999}, {"temperature": 1.9}, {"repetition_penalty": 1.9}])
def test_other_sampling_parameters_do_not_reproduce_the_record(
    sampling: dict[str, float], target: CausalLM, records: Sequence[Record]
) -> None:
    sampled = [record for record in records if record.sampling.temperature > 0][:10]
    outcomes = [replay(target, changed(record, **sampling)) for record in sampled]
    assert sum(one == DropReason.not_reproduced for one in outcomes) >= 9


def test_near_ties_are_accepted_and_counted(target: CausalLM, records: Sequence[Record]) -> None:
    record = records[0]
    assert record.sampling.temperature == 0
    replayed = replay(target, record)
    assert isinstance(replayed, Replayed)
    hidden = replayed.conversation.hidden_NE[record.prompt_length - 1 :]
    logits = target.logits(hidden[:1])[0]
    best, second = logits.topk(2).indices.tolist()
    gap = float(logits[best] - logits[second])
    tokens = list(record.tokens)
    tokens[record.prompt_length] = second
    changed_record = msgspec.structs.replace(record, tokens=tuple(tokens[: record.prompt_length + 1]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(TIE_LOGITS, torch.float32, gap * 1.01)
        assert near_ties(target, changed_record, hidden[:1]) == 1
        patch.setitem(TIE_LOGITS, torch.float32, gap * 0.99)
        assert near_ties(target, changed_record, hidden[:1]) is None


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"target": "other"}, DropReason.other_target),
        ({"prompt_length": 0}, DropReason.malformed),
        ({"prompt_length": 10_000}, DropReason.malformed),
        ({"tokens": (5, SIZE, 7)}, DropReason.malformed),
        ({"tokens": (5, -1, 7), "prompt_length": 1}, DropReason.malformed),
        ({"share": 0.0}, DropReason.malformed),
        ({"share": 1e-12}, DropReason.malformed),
        ({"share": float("nan")}, DropReason.malformed),
        ({"share": 2.0}, DropReason.malformed),
        ({"time_seconds": float("nan")}, DropReason.malformed),
        ({"time_seconds": float("inf")}, DropReason.malformed),
        ({"tokens": (5, 6), "prompt_length": 1}, DropReason.too_short),
        ({"tokens": (5,) * (POSITIONS + 1), "prompt_length": 1}, DropReason.too_long),
    ],
)
def test_unusable_record_has_a_drop_reason(
    change: dict[str, object], why: DropReason, records: Sequence[Record]
) -> None:
    record = records[0]
    assert static_drop_reason(record, record.target, SIZE, POSITIONS) is None
    assert static_drop_reason(msgspec.structs.replace(record, **change), record.target, SIZE, POSITIONS) == why
    for sampling in ({"seed": -1}, {"temperature": -1.0}, {"logit_bias": ((SIZE, 1.0),)}):
        assert static_drop_reason(changed(record, **sampling), record.target, SIZE, POSITIONS) == DropReason.malformed


def test_counting_two_drafts_together_equals_each_alone(
    target: CausalLM, draft: Path, records: Sequence[Record]
) -> None:
    head = load_head(prepare_eagle3(draft, target), target, dtype=torch.float32, device=torch.device("cpu"))
    sharp = CalibratedDraft(head, (3.0,))
    record = next(one for one in records if one.sampling.temperature == 0.8)
    replayed = replay(target, record)
    assert isinstance(replayed, Replayed)
    sample, shape = Sample(record, replayed.conversation), TreeShape.chain(3)
    together = count_steps([CalibratedDraft(head), sharp], sample, shape, target.config)
    assert together == [count_steps([one], sample, shape, target.config)[0] for one in (CalibratedDraft(head), sharp)]
