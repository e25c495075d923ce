"""The ``train`` and ``eval`` commands on a small random model with a tokenizer of one token per byte.

A target that two ranks share gives the same states and drafts as on one device.
"""

from __future__ import annotations

import json
import multiprocessing
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from specdecode_worker.__main__ import main
from specdecode_worker.commands import comparison as engine_evaluation
from specdecode_worker.models.causal_lm import CausalLM
from specdecode_worker.models.errors import ConfigMismatch
from specdecode_worker.models.fetch import model_hash
from specdecode_worker.models.headers import infer_method, read_tensor_headers
from specdecode_worker.models.optimize import quantise_target
from specdecode_worker.models.target_states import TargetStates
from specdecode_worker.models.weights import load_causal_lm
from specdecode_worker.training import rollout
from specdecode_worker.training.conversations import DataSet, answer_length
from specdecode_worker.training.evaluation import ZeroContextAttention
from specdecode_worker.training.recipe import VALIDATION_CONVERSATIONS, VALIDATION_PER_DOMAIN
from specdecode_worker.training.rollout import read_states, read_texts, texts_paths
from specdecode_worker.training.split_target import TargetPlacement, placed_target
from support import small_model
from support.small_model import write_target


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    write_target(folder, config={"intermediate_size": 48, "max_position_embeddings": 512})
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"] *= 0.1  # tied: at full size every token would predict itself
    save_file(weights, folder / "model.safetensors")
    return folder


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    lines = [
        {"messages": [{"role": "user", "content": "Hi there"}], "domain": "qa"},
        {"prompt": "def", "domain": "code"},
    ]
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return path


def train(model: Path, out: Path, *more: str) -> int:
    flags = ["--tokens", "300", "--draft-vocab", "64", "--steps", "3", "--batch-tokens", "512", "--dtype", "float32"]
    flags += ["--rows", "8", "--max-tokens", "40"]
    return main(["train", "--model", f"file://{model}", "--out", str(out), *flags, *more])


Evaluate = Callable[..., dict[str, Any]]


@pytest.fixture
def evaluate(model: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Evaluate:
    """Return a function that runs ``eval`` with more flags, and returns its document."""

    def run(*flags: str) -> dict[str, Any]:
        words = ["eval", "--model", f"file://{model}", "--dtype", "float32", "--cache-dir", str(tmp_path)]
        capsys.readouterr()
        assert main([*words, "--prompts", str(prompts), *flags, "--json"]) == 0
        document: dict[str, Any] = json.loads(capsys.readouterr().out)
        return document

    return run


def test_train_then_eval_with_prompts(
    model: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], evaluate: Evaluate
) -> None:
    out = tmp_path / "out"
    assert train(model, out, "--prompts", str(prompts)) == 0
    assert capsys.readouterr().out.strip() == str(out / "head")
    assert len(json.loads((out / "history.json").read_text())) == 1
    (document,) = evaluate("--draft", f"file://{out / 'head'}", "--tree", "tree:2,1", "--max-tokens", "20")["runs"]
    assert set(document["domains"]) == {"qa", "code"}
    assert 1.0 <= document["overall"]["tokens_per_step"] <= 3.0
    assert len(document["overall"]["acceptance"]) == 2
    assert 0 < document["overall"]["distinct_4grams"] <= 1
    assert document["overall"]["speedup"] > 0


def test_answers_of_another_target_are_not_learned_from(
    model: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor are those that were copied to another run: their states are not the ones that a draft will read."""
    assert train(model, tmp_path / "one", "--prompts", str(prompts)) == 0
    shutil.copytree(tmp_path / "one" / "recorded", tmp_path / "two" / "recorded")
    weights = load_file(model / "model.safetensors")
    weights["model.norm.weight"] *= 1.5
    save_file(weights, model / "model.safetensors")
    for name in ("one", "two"):
        assert train(model, tmp_path / name, "--prompts", str(prompts)) == 1
        assert "name another --out" in capsys.readouterr().err


def test_a_run_that_was_killed_behind_its_last_checkpoint_ends_with_the_weights_that_it_describes(
    model: Path, prompts: Path, tmp_path: Path
) -> None:
    """A kill between a draft and its checkpoint leaves a draft of steps that the next process repeats otherwise.

    What was recorded is not recorded again.
    """
    out = tmp_path / "out"
    assert train(model, out, "--prompts", str(prompts)) == 0
    path, recorded = out / "head" / "model.safetensors", sorted((out / "recorded").iterdir())
    best = {name: tensor.clone() for name, tensor in load_file(path).items()}
    save_file({name: torch.zeros_like(tensor) for name, tensor in best.items()}, path)
    assert train(model, out, "--prompts", str(prompts)) == 0
    ended = load_file(path)
    assert all(torch.equal(ended[name], tensor) for name, tensor in best.items())
    assert sorted((out / "recorded").iterdir()) == recorded


@pytest.mark.parametrize("method", ["peagle", "dflash", "eagle", "medusa", "draft-model"])
def test_other_methods_train_and_continue_training(method: str, model: Path, tmp_path: Path) -> None:
    text = tmp_path / "book.txt"
    text.write_text("All happy families are alike. " * 60)
    flags = ("--text", str(text), "--tokens", "1000", "--depth", "2", "--method", method)
    assert train(model, tmp_path / "one", *flags) == 0
    head = tmp_path / "one" / "head"
    assert infer_method(read_tensor_headers(head)) == method
    assert train(model, tmp_path / "two", *flags, "--draft", f"file://{head}") == 0
    lineage = json.loads((tmp_path / "two" / "head" / "lineage.json").read_text())
    assert lineage["parent"] == {"uri": f"file://{head}", "hash": model_hash(head)}
    assert lineage["method"] == method


def test_lineage_and_model_card_are_written(model: Path, prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert train(model, out, "--prompts", str(prompts), "--names", "speculators", "--layers", "2") == 0
    document = json.loads((out / "head" / "lineage.json").read_text())
    assert document["target"] == {"uri": f"file://{model}", "hash": model_hash(model)}
    assert document["parent"] is None
    data = document["data"]
    used = DataSet(out / "recorded", validation=VALIDATION_CONVERSATIONS, per_domain=VALIDATION_PER_DOMAIN)
    used.grow()
    lengths = [answer_length(one) for one in used.training + used.validation]
    assert data["answer_tokens"] == sum(data["by_domain"].values()) == sum(lengths) > 0
    assert len(data["window"]) == 2
    assert document["settings"]["depth"] == 7
    assert set(document["vocabulary"]["uncovered"]) == set(data["by_domain"])
    assert document["results"] in document["history"]
    factors = json.loads((out / "head" / "calibration.json").read_text())
    assert factors["target_format"] == "float32"
    assert set(factors["by_temperature"]) == {"0.3", "0.6", "0.8", "1.0"}
    assert len(factors["sharpness"]) == len(factors["by_temperature"]["0.8"]["sharpness"]) == 7
    config = json.loads((out / "head" / "config.json").read_text())
    assert config["transformer_layer_config"]["num_hidden_layers"] == 2


def test_train_fails_if_the_target_only_loops(
    model: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollout, "MAX_CONSECUTIVE_DROPS", 16)
    weights = load_file(model / "model.safetensors")
    weights["model.embed_tokens.weight"] *= 10
    save_file(weights, model / "model.safetensors")
    assert train(model, tmp_path / "out", "--prompts", str(prompts)) == 1
    assert "loops" in capsys.readouterr().err


def test_eval_without_prompts_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval"]) == 2
    assert "--prompts" in capsys.readouterr().err


def test_eval_of_a_draft_model_counts_the_steps_of_the_engine(model: Path, prompts: Path, evaluate: Evaluate) -> None:
    """The target drafts for itself, so that every draft is accepted at every temperature.

    After its first token, each answer takes two steps; one answer's second step begins behind 257 tokens.
    """
    with prompts.open("a") as file:
        file.write("\n" + json.dumps({"prompt": "x" * 253, "domain": "long"}))
    drafted = ("--method", "draft-model", "--draft", f"file://{model}", "--depth", "3")
    document = evaluate(*drafted, "--max-tokens", "9", "--temperature", "0,0.8")
    assert [run["temperature"] for run in document["runs"]] == [0.0, 0.8]
    for run in document["runs"]:
        assert run["overall"]["acceptance"] == [1.0, 1.0, 1.0]
        assert run["overall"]["tokens_per_drafted_step"] == run["overall"]["tokens_per_step"] == 4.0
        assert run["overall"]["drafted_steps"] == 1.0
        assert run["overall"]["identical_texts"] == 1.0
        figures = {"tokens_per_step": 4.0, "acceptance": [1.0, 1.0, 1.0]}
        assert run["overall"]["contexts"] == {"1-256": {"steps": 5, **figures}, "257-1024": {"steps": 1, **figures}}
        assert run["domains"]["qa"]["contexts"] == {"1-256": {"steps": 2, **figures}}
    assert "in 1 steps at a context of 257-1024 tokens" in engine_evaluation.table(document)


def test_eval_compares_formats_of_the_target(model: Path, evaluate: Evaluate) -> None:
    """A draft that is the plain target drafts worse for the rounded one, and without an error for itself."""
    drafted = ("--method", "draft-model", "--draft", f"file://{model}", "--depth", "3")
    compared = ("--quantization", "fp8", "--against", f"file://{model}")
    document = evaluate(*drafted, *compared, "--max-tokens", "33")
    assert document["target_format"] == "fp8, rounded at load"
    assert document["against"]["target_format"] == "float32"
    (rounded,), (plain,) = (part["runs"] for part in (document, document["against"]))
    assert plain["overall"]["acceptance"] == [1.0, 1.0, 1.0]
    assert rounded["overall"]["acceptance"][0] < 1.0
    assert rounded["overall"]["identical_texts"] == 1.0
    ratio = rounded["overall"]["tokens_per_step"] / plain["overall"]["tokens_per_step"]
    assert f"tokens/step over those of the other format {ratio:.3f}" in engine_evaluation.table(document)


def test_trained_parallel_head_drafts_in_the_engine(
    model: Path, prompts: Path, tmp_path: Path, evaluate: Evaluate
) -> None:
    """After 40 steps the first two of four depths are accepted now and then, and the text is that of plain decoding."""
    out = tmp_path / "out"
    flags = ("--method", "peagle", "--prompts", str(prompts), "--depth", "4", "--steps", "40")
    assert train(model, out, *flags, "--learning-rate", "0.01") == 0
    drafted = ("--method", "peagle", "--draft", f"file://{out / 'head'}", "--depth", "4")
    runs = evaluate(*drafted, "--max-tokens", "30", "--temperature", "0,0.8")["runs"]
    assert [run["overall"]["identical_texts"] for run in runs] == [1.0, 1.0]
    assert all(share > 0 for share in runs[0]["overall"]["acceptance"][:2])


def test_eval_of_prompt_lookup_needs_no_draft(evaluate: Evaluate) -> None:
    document = evaluate("--method", "ngram", "--max-tokens", "6")
    assert (document["method"], document["draft"]) == ("ngram", None)
    overall = document["runs"][0]["overall"]
    assert overall["identical_texts"] == 1.0
    assert 1.0 <= overall["tokens_per_step"] <= overall["tokens_per_drafted_step"] or not overall["drafted_steps"]


def test_eval_of_suffix_decoding_does_not_draft_from_the_answers_it_compares_with(evaluate: Evaluate) -> None:
    document = evaluate("--method", "suffix", "--max-tokens", "12", "--temperature", "0.9,0.9")
    first, second = (run["overall"] for run in document["runs"])
    assert first["tokens_per_step"] == second["tokens_per_step"] < 1.5, "sampled text of a random model has no repeats"


def test_eval_with_two_ranks_counts_the_same_steps(model: Path, evaluate: Evaluate) -> None:
    flags = ["--method", "draft-model", "--draft", f"file://{model}", "--depth", "2", "--max-tokens", "10"]
    flags += ["--temperature", "0,0.8", "--device", "cpu", "--threads", "2"]
    documents = [evaluate(*flags, "--tensor-parallel-size", size) for size in ("1", "2")]
    for one, two in zip(*(document["runs"] for document in documents), strict=True):
        assert two["overall"]["identical_texts"] == 1.0
        assert two["overall"]["tokens_per_step"] == one["overall"]["tokens_per_step"] == 3.0
        assert two["domains"].keys() == one["domains"].keys()


def test_train_with_two_ranks_learns_what_one_learns(model: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "texts.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt": f"text {i}", "domain": "a"}) for i in range(12)))
    flags = ["--prompts", str(prompts), "--tokens", "200", "--max-tokens", "24", "--rows", "4", "--depth", "2"]
    flags += ["--validate-steps", "3", "--threads", "1", "--device", "cpu"]
    heads, texts = {}, {}
    for size in ("1", "2"):
        out = tmp_path / f"out-{size}"
        assert train(model, out, *flags, "--tensor-parallel-size", size) == 0
        heads[size] = load_file(out / "head" / "model.safetensors")
        texts[size] = [read_texts(path) for path in texts_paths(out / "recorded")]
    assert texts["2"] == texts["1"], "the engine's answers do not depend on the number of ranks"
    assert heads["1"].keys() == heads["2"].keys()
    for name, tensor in heads["1"].items():
        torch.testing.assert_close(heads["2"][name].float(), tensor.float(), rtol=1e-2, atol=1e-3)


def test_tokens_per_step_is_clustered_by_request() -> None:
    assert engine_evaluation.tokens_per_step([]) == (0.0, 0.0)
    assert engine_evaluation.tokens_per_step([(10, 20), (10, 20)]) == (2.0, 0.0)
    mean, error = engine_evaluation.tokens_per_step([(10, 10), (10, 30)])
    assert (mean, round(error, 4)) == (2.0, round(200**0.5 / 20, 4))


CPU = torch.device("cpu")
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


@pytest.fixture(scope="module", params=["tied", "untied"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    small_model.write_target(path, config={"tie_word_embeddings": request.param == "tied"})
    if request.param == "untied":
        weights = load_file(path / "model.safetensors")
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].flip(0).contiguous()
        save_file(weights, path / "model.safetensors")
    return path


@pytest.fixture(scope="module")
def whole(folder: Path) -> CausalLM:
    return load_causal_lm(folder, dtype=torch.float32, device=CPU)


@pytest.fixture
def split(folder: Path) -> Iterator[CausalLM]:
    """Return the target in two parts; a process can be in one process group only, so no test shares it."""
    with placed_target(TargetPlacement(folder=folder, dtype="float32", device=CPU, size=2, threads=1)) as target:
        yield target


@torch.inference_mode()
def test_states_and_logits_are_those_of_one_device(whole: CausalLM, split: CausalLM) -> None:
    assert split.config.num_attention_heads == whole.config.num_attention_heads // 2
    for length in (3, 40):
        tokens_N = torch.randint(0, 250, (length,), generator=torch.Generator().manual_seed(length))
        expected, split_states = read_states(whole, tokens_N), read_states(split, tokens_N)
        for one, other in zip(expected, split_states, strict=True):
            torch.testing.assert_close(other, one, **CLOSE)
        torch.testing.assert_close(split.logits(split_states[1]), whole.logits(expected[1]), **CLOSE)


@torch.inference_mode()
def test_pass_behind_a_context_is_that_of_one_device(whole: CausalLM, split: CausalLM) -> None:
    tokens = torch.ones(4, dtype=torch.int64)
    outs = [
        target(tokens, torch.arange(100, 104), ZeroContextAttention(), TargetStates((), True))
        for target in (whole, split)
    ]
    torch.testing.assert_close(outs[1].hidden_TE, outs[0].hidden_TE, **CLOSE)


@pytest.mark.parametrize("size", [1, 2])
def test_the_target_is_rounded_as_workers_round_it(folder: Path, whole: CausalLM, size: int) -> None:
    """Distillation learns from the target that is served. Several devices round parts of rows, as workers do."""
    served = load_causal_lm(folder, dtype=torch.float32, device=CPU)
    quantise_target(served, "fp8", CPU)
    placement = TargetPlacement(folder=folder, dtype="float32", device=CPU, size=size, threads=1, quantization="fp8")
    tokens_N = torch.arange(20)
    with torch.inference_mode(), placed_target(placement) as target:
        states = read_states(target, tokens_N)[1]
        assert target.form == "fp8, rounded at load"
    if size == 1:
        torch.testing.assert_close(states, read_states(served, tokens_N)[1], **CLOSE)
    assert not torch.allclose(states, read_states(whole, tokens_N)[1], **CLOSE)


def test_number_of_devices_that_does_not_divide_the_heads_is_refused(folder: Path) -> None:
    placement = TargetPlacement(folder=folder, dtype="float32", device=CPU, size=3)
    with pytest.raises(ConfigMismatch, match="cannot be split"), placed_target(placement):
        pass


def test_the_other_ranks_end_before_the_first_leaves_their_group(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL waits for the ranks of a machine that are still in the group."""
    placement = TargetPlacement(folder=folder, dtype="float32", device=CPU, size=2, threads=1)
    destroy, running = dist.destroy_process_group, [""]

    def destroyed() -> None:
        running[:] = [one.name for one in multiprocessing.active_children() if one.name.startswith("target-rank")]
        destroy()

    monkeypatch.setattr(dist, "destroy_process_group", destroyed)
    with placed_target(placement):
        pass
    assert (running, dist.is_initialized()) == ([], False)


def test_lost_rank_ends_the_process(folder: Path) -> None:
    """A collective without a rank may never return, so a Job's pod has to end and to start again."""
    code = (
        "import multiprocessing, torch, time\n"
        "from pathlib import Path\n"
        "from specdecode_worker.training.split_target import TargetPlacement, placed_target\n"
        "if __name__ == '__main__':\n"
        f"    placement = TargetPlacement(folder=Path({str(folder)!r}), dtype='float32', device=torch.device('cpu'), "
        "size=2, threads=1)\n"
        "    with placed_target(placement):\n"
        "        multiprocessing.active_children()[0].kill()\n"
        "        time.sleep(60)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, "a rank of the target ended" in ended.stderr) == (1, True), ended.stderr
