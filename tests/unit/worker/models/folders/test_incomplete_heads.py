"""Heads without an output matrix, and heads from before the target's vocabulary grew."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from specdecode_worker.models.causal_lm import CausalLM
from specdecode_worker.models.errors import ConfigMismatch, WeightMismatch
from specdecode_worker.models.weights import load_causal_lm
from support import small_model
from support.worker.checkpoints import check_draft
from support.worker.small_folders import change, loaded_head

OPTIONS: Any = {"dtype": torch.float32, "device": torch.device("cpu")}
OLDER = small_model.VOCAB_SIZE - 6


@pytest.fixture
def target_folder(tmp_path: Path) -> Path:
    (folder := tmp_path / "target").mkdir()
    small_model.write_target(folder)
    return folder


@pytest.fixture
def target(target_folder: Path) -> CausalLM:
    return load_causal_lm(target_folder, **OPTIONS)


@pytest.fixture
def head(tmp_path: Path) -> Path:
    (folder := tmp_path / "head").mkdir()
    small_model.write_draft(folder)
    return folder


@pytest.mark.parametrize("map_is_stored", [True, False])
def test_a_head_without_output_matrix_uses_the_targets(
    head: Path, target: CausalLM, target_folder: Path, map_is_stored: bool
) -> None:
    change(head, **{"lm_head.weight": target.lm_head.weight.detach().clone()})
    wanted = loaded_head("eagle3", head, target)
    change(head, **{"lm_head.weight": None, **({} if map_is_stored else {"d2t": None})})
    check_draft("eagle3", head, target_folder)
    loaded = loaded_head("eagle3", head, target)
    hidden_TE = torch.randn(3, small_model.CONFIG["hidden_size"])
    assert torch.equal(loaded.logits(hidden_TE), wanted.logits(hidden_TE))
    assert loaded.lm_head.weight.data_ptr() == target.lm_head.weight.data_ptr(), "it takes no memory of its own"
    loaded.double()
    assert target.lm_head.weight.dtype == torch.float32, "a head that is trained leaves the target as it is"


@pytest.mark.parametrize("known", [OLDER, 40])
def test_a_head_from_before_the_vocabulary_grew_loads(
    head: Path, target: CausalLM, target_folder: Path, known: int
) -> None:
    """It has the older size in its config and t2d, and proposes tokens of that size alone."""
    chosen = torch.arange(known) * (OLDER // known)
    sizes = {"vocab_size": OLDER, "draft_vocab_size": known}
    t2d = torch.zeros(OLDER, dtype=torch.bool)
    t2d[chosen] = True
    output = load_file(head / "model.safetensors")["lm_head.weight"][:known].clone()
    change(head, sizes, **{"lm_head.weight": output, "d2t": chosen - torch.arange(known), "t2d": t2d})
    check_draft("eagle3", head, target_folder)
    loaded = loaded_head("eagle3", head, target)
    assert torch.equal(loaded.target_ids, chosen)
    assert loaded.logits(torch.randn(2, small_model.CONFIG["hidden_size"])).shape == (2, known)
    change(head, d2t=chosen - torch.arange(known) + OLDER)
    with pytest.raises(WeightMismatch, match=r"maps outside|must be 0"):
        loaded_head("eagle3", head, target)


def test_a_head_of_another_vocabulary_is_refused(head: Path, target: CausalLM) -> None:
    rows = torch.randn(OLDER, small_model.CONFIG["hidden_size"])
    sizes = {"vocab_size": OLDER, "draft_vocab_size": OLDER}
    change(head, sizes, **{"embed_tokens.weight": rows, "lm_head.weight": rows.clone(), "d2t": None})
    with pytest.raises(WeightMismatch, match=r"embed_tokens\.weight has 252 rows"):
        loaded_head("eagle3", head, target)
    change(head, {"vocab_size": small_model.VOCAB_SIZE + 1})
    with pytest.raises(ConfigMismatch, match="vocab_size is 259"):
        loaded_head("eagle3", head, target)


def test_a_head_of_20_gigabytes_by_its_header_is_refused_unread(head: Path, target: CausalLM) -> None:
    """The file is sparse: it has the size that its header says, and no content."""
    change(head, **{"lm_head.weight": None})
    path, claimed = head / "model.safetensors", 20 * 10**9
    length = int.from_bytes(path.read_bytes()[:8], "little")
    header, data = json.loads(path.read_bytes()[8 : 8 + length]), path.read_bytes()[8 + length :]
    offsets = [len(data), len(data) + claimed]
    header["lm_head.weight"] = {"dtype": "F32", "shape": [10**7, 500], "data_offsets": offsets}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text + data)
        file.truncate(8 + len(text) + offsets[1])
    with pytest.raises(WeightMismatch, match=r"lm_head\.weight has shape \[10000000, 500\]"):
        loaded_head("eagle3", head, target)
