"""Tests of the configuration that `serve` builds from flags and environment."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specdecode_worker.__main__ import main
from specdecode_worker.commands import serve
from specdecode_worker.commands.arguments import new_parser
from specdecode_worker.contract import CaptureConfig, EngineConfig, Env, Plan, WorkerConfig
from specdecode_worker.termination import ENV_PATH


def read(*words: str) -> tuple[WorkerConfig, Plan]:
    return serve.config_from_flags(new_parser("serve").parse_args(words))


def speculative(**fields: Any) -> tuple[str, str]:
    """Return vLLM's flag with these fields."""
    return "--speculative-config", json.dumps(fields)


OWN = ("--draft-placement", "own")
PLACED = ("--draft", "file:///d", *OWN)


def test_without_flags_the_embedded_pair_is_served_on_loopback() -> None:
    config, plan = read()
    assert (config.model.served_name, config.server.host) == ("smollm2-135m-instruct", "127.0.0.1")
    assert (config.draft.method, plan.initial.depth, plan.max_depth) == ("eagle3", 3, 3)


def test_tree_draft_sets_its_width() -> None:
    _, plan = read("--tree", "tree:4,2,1")
    assert (plan.initial.nodes, plan.max_depth, plan.top_k) == (20, 3, 4)


@pytest.mark.parametrize("uri", ["hf://o/n", "hf://o/n@main", "hf://o/n@refs/pr/4", "file:///m@1/n/"])
def test_the_served_name_has_no_revision(uri: str) -> None:
    assert read("--model", uri)[0].model.served_name == "n"


def test_target_without_a_draft_is_served_without_speculation() -> None:
    config, plan = read("--model", "file:///models/llama", "--served-model-name", "x")
    assert (config.draft.method, config.model.served_name, plan) == ("none", "x", Plan())


def test_vllm_speculative_config_is_accepted() -> None:
    form = speculative(method="eagle3", model="file:///d", num_speculative_tokens=5)
    config, plan = read("--model", "file:///m", *form)
    assert (config.draft.uri, plan.initial.depth) == ("file:///d", 5)
    with pytest.raises(ValueError, match="tree_choices"):
        read(*speculative(tree_choices=1))
    with pytest.raises(ValueError, match="one or the other"):
        read(*form, "--depth", "2")


def test_vllm_draft_model_and_ngram_configs_are_accepted() -> None:
    two, _ = read("--model", "file:///m", *speculative(method="draft_model", model="file:///d"))
    assert (two.draft.method, two.draft.uri) == ("draft-model", "file:///d")
    lookup, plan = read(*speculative(method="ngram", model="ngram", num_speculative_tokens=4, prompt_lookup_max=6))
    assert (lookup.draft.method, lookup.draft.uri, plan.initial.depth) == ("ngram", None, 4)
    assert (lookup.draft.prompt_lookup_min, lookup.draft.prompt_lookup_max) == (2, 6)


@pytest.mark.parametrize("form", [{"method": "eagle3", "parallel_drafting": True}, {"method": "peagle"}])
def test_parallel_drafting_of_vllm_is_the_method_peagle(form: dict[str, Any]) -> None:
    config, plan = read(*speculative(**form, model="file:///d", num_speculative_tokens=5))
    assert (config.draft.method, config.draft.uri, plan.initial.depth) == ("peagle", "file:///d", 5)
    named, _ = read("--method", "peagle", "--draft", "file:///d", "--draft-quantization", "int4")
    assert (named.draft.method, named.draft.quantization) == ("peagle", "int4")


def test_quantization_flags_of_target_and_draft_are_read() -> None:
    form = speculative(method="eagle3", model="file:///d", quantization="int4")
    config, _ = read("--model", "file:///m", *form, "--quantization", "fp8")
    assert (config.draft.quantization, config.model.quantization) == ("int4", "fp8")
    config, _ = read("--draft-quantization", "int8")
    assert (config.draft.quantization, config.model.quantization) == ("int8", None)
    with pytest.raises(ValueError, match="one or the other"):
        read(*form, "--draft-quantization", "int4")


def test_the_placement_of_the_draft_is_read() -> None:
    assert read()[0].draft.placement == "shared"
    assert read(*OWN)[0].draft.placement == "own"
    config, _ = read("--method", "draft-model", *PLACED)
    assert (config.draft.method, config.draft.placement) == ("draft-model", "own")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--method", "ngram", *OWN), "own is for methods eagle3, eagle, draft-model, not for ngram"),
        (("--method", "dflash", *PLACED), "not for dflash"),
        (("--method", "peagle", *PLACED), "not for peagle"),
        (("--method", "medusa", *PLACED), "not for medusa"),
        (("--method", "none", *OWN), "not for none"),
        ((*OWN, "--sampler", "mss"), "placement own needs the sampler coupled"),
        (speculative(method="ngram", quantization="int4"), "ngram has no MLP"),
        (speculative(method="suffix", quantization="int4"), "suffix has no MLP"),
        (speculative(method="suffix", prompt_lookup_max=6), "for the method ngram, not for suffix"),
        (speculative(method="eagle3", model="file:///d", prompt_lookup_max=6), "not for eagle3"),
        (("--method", "suffix", "--draft", "file:///d"), "--method suffix takes no --draft"),
        (speculative(method="medusa", model="file:///d", quantization="fp8"), "medusa has no"),
        (("--method", "peagle"), "--method peagle needs --draft URI"),
        (speculative(method="ngram", parallel_drafting=True), "for the method eagle3, not ngram"),
        (speculative(method="eagle3", parallel_drafting=1), "parallel_drafting must be true"),
        (("--model", "file:///m", "--draft-quantization", "int4"), "none has no MLP"),
        (speculative(quantization="int3"), "quantization"),
    ],
)
def test_unsupported_draft_options_are_reported(words: tuple[str, ...], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        read(*words)


@pytest.mark.parametrize("form", ["[]", "{", "3", '{"num_speculative_tokens": 0}', '{"num_speculative_tokens": "3"}',
                                  '{"num_speculative_tokens": 64}'])  # fmt: skip
def test_invalid_speculative_config_is_reported(form: str) -> None:
    with pytest.raises(ValueError, match="--speculative-config"):
        read("--speculative-config", form)


def test_vllm_engine_flags_are_accepted() -> None:
    words = "--max-num-seqs 3 --max-num-batched-tokens 64 --max-model-len 99 --gpu-memory-utilization 0.5 "
    words += "--tensor-parallel-size 2 --no-enable-prefix-caching --no-enable-chunked-prefill --sampler mss "
    words += "--enforce-eager --cuda-graph-sizes 1 3 --kernel-timings times.json "
    words += "--tool-call-parser hermes --max-waiting 7 --dtype float32 --served-model-name x"
    config, _ = read(*words.split())
    assert config.engine == EngineConfig(
        max_num_seqs=3, max_num_batched_tokens=64, gpu_memory_utilization=0.5, tensor_parallel_size=2,
        enable_prefix_caching=False, enable_chunked_prefill=False, sampler="mss",
        enforce_eager=True, cuda_graph_sizes=(1, 3), kernel_timings="times.json",
    )  # fmt: skip
    assert (config.server.tool_call_parser, config.server.max_waiting) == ("hermes", 7)
    assert (config.model.max_model_len, config.model.dtype, config.model.served_name) == (99, "float32", "x")
    assert read()[0].engine == EngineConfig(), "defaults are the contract's"


def test_defaults_depend_on_the_device() -> None:
    """A GPU takes more sequences, more tokens in a step and more of the memory, unless a flag says otherwise."""
    engine = read("--device", "cuda", "--max-num-seqs", "16")[0].engine
    assert (engine.max_num_seqs, engine.max_num_batched_tokens, engine.gpu_memory_utilization) == (16, 2048, 0.9)
    assert EngineConfig.model_validate_json(engine.model_dump_json()) == engine


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--gpu-memory-utilization", "1.5"], "gpu_memory_utilization"),
        (["--max-num-seqs", "0"], "max_num_seqs"),
        (["--cuda-graph-sizes", "0"], "cuda_graph_sizes"),
        (["--model", "file:///m", "--method", "eagle3"], "--draft"),
        (["--max-model-len", "3"], "max_model_len"),
        (["--capture-share", "0.1"], "--capture DIR"),
        (["--capture", "d", "--capture-share", "code=most"], "task=0.1"),
        (["--capture", "d", "--capture-share", "code=2"], "code"),
        (["--capture", "d", "--capture-redact", "hook"], "redact"),
        (["--capture", "d", "--capture-max-bytes", "1"], "max_bytes"),
    ],
)
def test_invalid_flags_are_reported(words: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", *words]) == 2
    assert named in capsys.readouterr().err


def test_wrong_field_of_a_config_in_the_environment_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv(Env.config, '{"model": {"uri": "x", "served_name": "m"}, "engine": {"max_num_seqs": "many"}}')
    monkeypatch.setenv(ENV_PATH, str(tmp_path / "words"))
    assert main(["serve"]) == 2
    assert "engine.max_num_seqs" in capsys.readouterr().err
    assert "engine.max_num_seqs" in (tmp_path / "words").read_text()


def test_capture_is_off_by_default() -> None:
    assert read()[0].capture is None
    assert read("--capture", "/d")[0].capture == CaptureConfig(dir="/d")
    words = "--capture /d --capture-max-bytes 99999 --capture-max-age 60 --capture-share 0.1 code=1 qa=0"
    config, _ = read(*words.split(), "--capture-redact", "mine:hook")
    shares = {"code": 1.0, "qa": 0.0}
    assert config.capture == CaptureConfig(
        dir="/d", max_bytes=99999, max_age_seconds=60, share=0.1, task_shares=shares, redact="mine:hook"
    )


def in_pod(monkeypatch: pytest.MonkeyPatch, *words: str) -> WorkerConfig:
    """Return the configuration of a pod whose command has these flags."""
    started: list[WorkerConfig] = []

    async def serve_nothing(config: WorkerConfig, plan: Plan | None, *, api_keys: list[str]) -> int:
        started.append(config)
        return 0

    monkeypatch.setattr(serve, "serve", serve_nothing)
    monkeypatch.setenv(Env.config, '{"model": {"uri": "x", "served_name": "m"}, "engine": {"max_num_seqs": 3}}')
    assert main(["serve", *words]) == 0
    return started[0]


def test_flags_in_a_pod_replace_single_values_of_its_config(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = in_pod(monkeypatch)
    flags = "--queue-timeout-seconds=5 --api-key-metrics --no-vllm-metrics --no-enable-prefix-caching --capture /c"
    config = in_pod(monkeypatch, *flags.split())
    assert (config.server.queue_timeout_seconds, config.server.api_key_metrics) == (5, True)
    assert (plain.server.vllm_metrics, config.server.vllm_metrics) == (True, False)
    assert (config.engine.enable_prefix_caching, config.engine.max_num_seqs) == (False, 3)
    assert config.capture is not None
    assert config.model == plain.model
    assert config.server.host == plain.server.host == "0.0.0.0", "defaults of flags replace nothing"


@pytest.mark.parametrize("words", [("--model", "y"), ("--depth", "2"), ("--queue-timeout-seconds", "-1")])
def test_flags_that_a_pod_must_not_have_are_refused(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv(Env.config, '{"model": {"uri": "x", "served_name": "m"}}')
    monkeypatch.setenv(ENV_PATH, str(tmp_path / "message"))
    assert main(["serve", *words]) == 2
    assert Env.config in capsys.readouterr().err


def test_flags_are_not_abbreviated() -> None:
    with pytest.raises(SystemExit):
        read("--max-waitin", "2")
