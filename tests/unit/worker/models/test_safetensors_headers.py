"""Tests that tensor headers are read strictly and without the data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from specdecode_worker.models.errors import WeightMismatch
from specdecode_worker.models.headers import (
    INDEX,
    TensorHeader,
    read_tensor_headers,
    weight_files,
)

TENSORS = {
    "a.weight": torch.zeros(2, 3),
    "b": torch.zeros(5, dtype=torch.bfloat16),
    "d2t": torch.zeros(4, dtype=torch.int64),
    "t2d": torch.zeros(7, dtype=torch.bool),
    "layers.0.rotary_emb.inv_freq": torch.zeros(8),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_file(TENSORS, tmp_path / "model.safetensors")
    return tmp_path


def test_headers_have_names_shapes_and_types(folder: Path) -> None:
    headers = read_tensor_headers(folder)
    assert headers == {
        "a.weight": TensorHeader((2, 3), "F32", "model.safetensors"),
        "b": TensorHeader((5,), "BF16", "model.safetensors"),
        "d2t": TensorHeader((4,), "I64", "model.safetensors"),
        "t2d": TensorHeader((7,), "BOOL", "model.safetensors"),
    }
    floating = {name for name, tensor in headers.items() if tensor.is_floating_point}
    assert floating == {name for name in headers if TENSORS[name].is_floating_point()} == {"a.weight", "b"}


def test_a_file_that_is_cut_off_is_refused(folder: Path) -> None:
    whole = (folder / "model.safetensors").read_bytes()
    for length in (0, 7, 40, len(whole) - 1):
        (folder / "model.safetensors").write_bytes(whole[:length])
        with pytest.raises(WeightMismatch, match=r"model\.safetensors cannot be read"):
            read_tensor_headers(folder)


def test_a_tensor_in_two_files_is_refused(folder: Path) -> None:
    save_file({"b": TENSORS["b"]}, folder / "more.safetensors")
    with pytest.raises(WeightMismatch, match=r"b stands in both model\.safetensors and more\.safetensors"):
        read_tensor_headers(folder)


def test_consolidated_copy_of_mistral_is_ignored(folder: Path) -> None:
    save_file({"b": TENSORS["b"]}, folder / "consolidated.safetensors")
    assert [path.name for path in weight_files(folder)] == ["model.safetensors"]


def test_only_files_of_the_index_are_read(folder: Path) -> None:
    save_file({"b": TENSORS["b"]}, folder / "stale.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(TENSORS, "model.safetensors")}))
    assert "a.weight" in read_tensor_headers(folder)
    (folder / INDEX).write_text(json.dumps({"weight_map": {"b": "model-2.safetensors"}}))
    with pytest.raises(WeightMismatch, match=r"model-2\.safetensors is missing.*or delete the index"):
        read_tensor_headers(folder)


@pytest.mark.parametrize(
    "index",
    ["", "[]", "{}", '{"weight_map": 1}', '{"weight_map": {}}', '{"weight_map": {"b": 1}}', "[" * 10**5]
    + [json.dumps({"weight_map": {"b": name}}) for name in ("../model.safetensors", "/etc/passwd", "")]
    + ['{"weight_map": {"b": ["x"]}}'],
    ids=lambda text: str(text)[:40],
)
def test_a_broken_index_is_refused(index: Any, folder: Path) -> None:
    (folder / INDEX).write_text(index)
    with pytest.raises(WeightMismatch, match=INDEX):
        read_tensor_headers(folder)
