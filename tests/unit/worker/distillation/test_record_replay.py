"""Replay reproduces the engine's text for all sampling parameters and no other text, and counts its steps.

P-EAGLE and DFlash heads are distilled from captured traffic to drafts of the same method.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from specdecode_worker.__main__ import main
from specdecode_worker.capture import Record
from specdecode_worker.commands.local_engine import TokenizedPrompt
from specdecode_worker.contract import Method, TreeShape
from specdecode_worker.models.causal_lm import CausalLM
from specdecode_worker.models.headers import infer_method, read_tensor_headers
from specdecode_worker.models.weights import load_causal_lm
from specdecode_worker.training.artifacts import write_draft
from specdecode_worker.training.evaluation import CalibratedDraft, Sample, count_steps, step_costs
from specdecode_worker.training.heads import load_distillable, new_dflash, new_head, new_medusa, new_peagle
from specdecode_worker.training.replay import TIE_LOGITS, DropReason, Replayed, near_ties, replay, static_drop_reason
from support.training_fixtures import shaken
from support.worker.distillation_runs import SAMPLING_PARAMS, engine_of
from support.worker.small_folders import loaded_head

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
    assert all(static_drop_reason(one, record.target, SIZE, POSITIONS) is None for one in records)
    assert static_drop_reason(msgspec.structs.replace(record, **change), record.target, SIZE, POSITIONS) == why
    for sampling in ({"seed": -1}, {"temperature": -1.0}, {"logit_bias": ((SIZE, 1.0),)}):
        assert static_drop_reason(changed(record, **sampling), record.target, SIZE, POSITIONS) == DropReason.malformed


def test_counting_two_drafts_together_equals_each_alone(
    target: CausalLM, draft: Path, records: Sequence[Record]
) -> None:
    head = loaded_head("eagle3", draft, target)
    sharp = CalibratedDraft(head, (3.0,))
    record = next(one for one in records if one.sampling.temperature == 0.8)
    replayed = replay(target, record)
    assert isinstance(replayed, Replayed)
    sample, shape = Sample(record, replayed.conversation), TreeShape.chain(3)
    together = count_steps([CalibratedDraft(head), sharp], sample, shape, target.config)
    assert together == [count_steps([one], sample, shape, target.config)[0] for one in (CalibratedDraft(head), sharp)]


CPU = torch.device("cpu")


@pytest.fixture
def head(method: str, model: Path, draft: Path, target: CausalLM, tmp_path: Path) -> Path:
    """Return the folder of a head for the small target, of which every layer has an effect."""
    if method == "eagle3":
        return draft
    known = torch.arange(0, target.config.vocab_size, 2)
    made = {
        "peagle": lambda: new_peagle(target, known),
        "dflash": lambda: new_dflash(target, 1, 3),
        "medusa": lambda: new_medusa(target, known, 2),
    }[method]()
    write_draft(shaken(made), tmp_path / "head", model)
    return tmp_path / "head"


def distill(flags: list[str], head: Path, out: Path) -> int:
    """Run ``distill`` on the capture of ``flags`` with another draft and return its exit code."""
    words = [word for word in flags if word != "--job"]
    words[words.index("--draft") + 1] = f"file://{head}"
    return main(["distill", *words, "--out", str(out)])


@pytest.mark.parametrize("method", ["peagle", "dflash"])
def test_a_parallel_head_is_distilled_to_one_of_its_method(
    method: str, head: Path, flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert distill(flags, head, out) == 3
    document = json.loads(capsys.readouterr().out)
    assert set(document["domains"]) == {"alpha", "beta", "golden/g"}
    assert document["training"]["rounds"][-1]["step"] == 4
    assert infer_method(read_tensor_headers(out / "head")) == method
    before, best = (load_file(folder / "model.safetensors") for folder in (head, out / "head"))
    assert before.keys() == best.keys()
    trained = torch.load(out / "checkpoint.pt", weights_only=True)["head"]
    changed = (trained["fc.weight"] - before["fc.weight"].float()).abs().mean()
    assert 0 < changed < 0.05, "it goes on from the deployed head"
    lineage = json.loads((out / "head" / "lineage.json").read_text())
    assert (lineage["method"], lineage["generation"]) == (method, 1)
    assert len(json.loads((out / "head" / "calibration.json").read_text())["sharpness"]) == 3


@pytest.mark.parametrize("shape", ["chain:3", "tree:2,2"])
@pytest.mark.parametrize("method", ["eagle3", "peagle", "dflash"])
def test_counted_steps_equal_engine_steps(
    method: Method, shape: str, head: Path, model: Path, target: CausalLM, records: Sequence[Record]
) -> None:
    """The verdict counts the steps that a worker would take with the head."""
    draft = CalibratedDraft(load_distillable(head, target, model, torch.float32, CPU))
    chosen = records[:15]
    engine = engine_of(model, head, method)
    engine.run_shape(TreeShape.parse(shape))
    prompts = [TokenizedPrompt(record.tokens[: record.prompt_length]) for record in chosen]
    answers, _ = engine.answer(prompts, [record.sampling for record in chosen])
    accepted = 0
    for record, answer in zip(chosen, answers, strict=True):
        replayed = replay(target, record)
        assert isinstance(replayed, Replayed)
        sample = Sample(record, replayed.conversation)
        (tally,) = count_steps([draft], sample, TreeShape.parse(shape), target.config)
        assert tuple(answer.tokens) == record.tokens[record.prompt_length :]
        assert tally.tokens == len(answer.tokens) - 1
        # The engine may draft beyond the end of the answer, which can add one step.
        assert tally.steps == pytest.approx(answer.drafts, abs=1), record.sampling
        accepted += tally.tokens - tally.steps
    assert accepted > 10, "a draft that is never right would prove nothing"


@pytest.mark.parametrize("method", ["medusa"])
def test_a_draft_of_another_method_is_refused(
    method: str, head: Path, flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert distill(flags, head, tmp_path / "out") == 1
    assert "holds a draft of method medusa; eagle3, peagle and dflash are distilled" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("new", "slots"),
    [(new_peagle, [4]), (lambda target, known: new_dflash(target, 1, 4), [5]), (new_head, [1] * 4)],
    ids=["peagle", "dflash", "eagle3"],
)
def test_a_step_of_a_parallel_head_is_timed_with_one_pass(
    new: Callable[[CausalLM, torch.Tensor], Any], slots: list[int], model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = load_causal_lm(model, dtype=torch.float32, device=CPU)
    made = new(target, torch.arange(target.config.vocab_size))
    calls: list[int] = []
    forward = made.forward
    monkeypatch.setattr(made, "forward", lambda *args: calls.append(len(args[1])) or forward(*args))
    step_costs(target, made, made, TreeShape.chain(4), rounds=1)
    assert calls == slots * 6, "two drafts in three rounds, of which two warm up"
