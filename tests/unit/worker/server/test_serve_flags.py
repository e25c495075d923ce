"""Flags and environment of `serve` become one config."""

from __future__ import annotations

import argparse

import pytest

from specdecode_worker.__main__ import main
from specdecode_worker.commands import serve
from specdecode_worker.contract import Env, Plan, WorkerConfig


def read(*words: str) -> tuple[WorkerConfig, Plan]:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    return serve.config_from_flags(parser.parse_args(words))


def test_without_flags_the_embedded_pair_is_served_on_loopback() -> None:
    config, plan = read()
    assert (config.model.served_name, config.server.host) == ("smollm2-135m-instruct", "127.0.0.1")
    assert (config.draft.method, plan.initial.depth, plan.max_depth) == ("eagle3", 3, 3)


def test_a_tree_brings_its_width() -> None:
    _, plan = read("--tree", "tree:4,2,1")
    assert (plan.initial.nodes, plan.max_depth, plan.top_k) == (20, 3, 4)


def test_a_target_alone_is_served_plainly() -> None:
    config, plan = read("--model", "file:///models/llama", "--served-model-name", "x")
    assert (config.draft.method, config.model.served_name, plan) == ("none", "x", Plan())


def test_vllms_form_of_the_draft() -> None:
    form = '{"method": "eagle3", "model": "file:///d", "num_speculative_tokens": 5}'
    config, plan = read("--model", "file:///m", "--speculative-config", form)
    assert (config.draft.uri, plan.initial.depth) == ("file:///d", 5)
    with pytest.raises(ValueError, match="tree_choices"):
        read("--speculative-config", '{"tree_choices": 1}')
    with pytest.raises(ValueError, match="one or the other"):
        read("--speculative-config", form, "--depth", "2")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--max-num-seqs", "0"], "max_num_seqs"),
        (["--model", "file:///m", "--method", "eagle3"], "--draft"),
        (["--max-model-len", "3"], "max_model_len"),
    ],
)
def test_wrong_flags_are_named(words: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", *words]) == 2
    assert named in capsys.readouterr().err


def test_a_wrong_config_in_the_environment_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(Env.config, '{"model": {"uri": "x", "served_name": "m"}, "engine": {"max_num_seqs": "many"}}')
    assert main(["serve"]) == 2
    assert "engine.max_num_seqs" in capsys.readouterr().err
