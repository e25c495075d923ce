"""The ``distill`` command on P-EAGLE and DFlash heads, from traffic to a draft of the same method; steps of a head."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

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
from specdecode_worker.training.replay import Replayed, replay
from support.training_fixtures import shaken
from support.worker.serving_records import engine_of

pytestmark = pytest.mark.slow

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
    drafted = accepted = 0
    for record, answer in zip(chosen, answers, strict=True):
        replayed = replay(target, record)
        assert isinstance(replayed, Replayed)
        sample = Sample(record, replayed.conversation)
        (tally,) = count_steps([draft], sample, TreeShape.parse(shape), target.config)
        assert tuple(answer.tokens) == record.tokens[record.prompt_length :]
        assert tally.tokens == len(answer.tokens) - 1
        # The engine may draft beyond the end of the answer, which can add one step.
        assert tally.steps == pytest.approx(answer.drafts, abs=1), record.sampling
        drafted, accepted = drafted + tally.steps, accepted + tally.tokens - tally.steps
    assert accepted > min(10, 0.02 * drafted), "a draft that is never right would prove nothing"


@pytest.mark.parametrize("method", ["medusa"])
def test_a_draft_of_another_method_is_refused(
    method: str, head: Path, flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert distill(flags, head, tmp_path / "out") == 1
    assert "holds a draft of method medusa; eagle3, peagle and dflash are distilled" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["peagle", "dflash", "eagle3"])
def test_a_step_of_a_parallel_head_is_timed_with_one_pass(
    kind: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = load_causal_lm(model, dtype=torch.float32, device=CPU)
    known = torch.arange(target.config.vocab_size)
    made = {
        "peagle": lambda: new_peagle(target, known),
        "dflash": lambda: new_dflash(target, 1, 4),
        "eagle3": lambda: new_head(target, known),
    }[kind]()
    calls: list[int] = []
    forward = made.forward
    monkeypatch.setattr(made, "forward", lambda *args: calls.append(len(args[1])) or forward(*args))
    step_costs(target, made, made, TreeShape.chain(4), rounds=1)
    slots = {"peagle": [4], "dflash": [5], "eagle3": [1] * 4}[kind]
    assert calls == slots * 6, "two drafts in three rounds, of which two warm up"
