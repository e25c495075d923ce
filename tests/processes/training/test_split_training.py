"""Training on a target that is split over two ranks, in one process that holds no other process group."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from specdecode_worker.__main__ import main
from specdecode_worker.training.rollout import read_texts, texts_paths
from support import small_model


def test_train_with_two_ranks_learns_what_one_learns(tmp_path: Path) -> None:
    model, prompts = tmp_path / "model", tmp_path / "prompts.jsonl"
    model.mkdir()
    small_model.write_target(model)
    weights = load_file(model / "model.safetensors")
    weights["model.embed_tokens.weight"] *= 0.1  # tied: at full size every token would predict itself
    save_file(weights, model / "model.safetensors")
    prompts.write_text("\n".join(json.dumps({"prompt": f"text {i}", "domain": "a"}) for i in range(12)))
    words = ["train", "--model", f"file://{model}", "--prompts", str(prompts), "--tokens", "200", "--max-tokens", "24"]
    words += ["--rows", "4", "--draft-vocab", "64", "--depth", "2", "--steps", "3", "--validate-steps", "3"]
    words += ["--dtype", "float32", "--threads", "1", "--device", "cpu"]
    heads, texts = {}, {}
    for size in ("1", "2"):
        out = tmp_path / f"out-{size}"
        assert main([*words, "--out", str(out), "--tensor-parallel-size", size]) == 0
        heads[size] = load_file(out / "head" / "model.safetensors")
        texts[size] = [read_texts(path) for path in texts_paths(out / "recorded")]
    assert texts["2"] == texts["1"], "the engine's answers do not depend on the number of ranks"
    assert heads["1"].keys() == heads["2"].keys()
    for name, tensor in heads["1"].items():
        torch.testing.assert_close(heads["2"][name].float(), tensor.float(), rtol=1e-2, atol=1e-3)
