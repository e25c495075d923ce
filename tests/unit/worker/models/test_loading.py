"""Tests of strict loading: a missing, extra or misshapen tensor of a target or a head is refused by name.

Tensor headers are read strictly and without the data.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specdecode_worker.models.causal_lm import CausalLM
from specdecode_worker.models.config import eagle3_config
from specdecode_worker.models.download_folder import MANIFEST
from specdecode_worker.models.errors import ConfigMismatch, WeightMismatch
from specdecode_worker.models.fetch import model_hash
from specdecode_worker.models.headers import INDEX, TensorHeader, read_tensor_headers, weight_files
from specdecode_worker.models.weights import fill_causal_lm, load_causal_lm, prepare_causal_lm, prepare_eagle3
from support.worker.checkpoints import check_draft, write
from support.worker.dense_attention import dense
from support.worker.small_folders import change, loaded_head, write_head

CPU = torch.device("cpu")
DRAFT_VOCABULARY = 40


@pytest.fixture
def target_folder(target: CausalLM, shape: dict[str, Any], tmp_path: Path) -> Path:
    return write(tmp_path / "target", shape, target.state_dict())


@pytest.fixture
def head_folder(shape: dict[str, Any], tmp_path: Path) -> Path:
    return write_head(tmp_path / "head", target=shape, draft_vocab_size=DRAFT_VOCABULARY)


def load_target(folder: Path) -> CausalLM:
    return load_causal_lm(folder, dtype=torch.float32, device=CPU)


def test_loaded_weights_equal_saved_weights(target: CausalLM, target_folder: Path, head_folder: Path) -> None:
    for loaded, folder in (
        (load_target(target_folder), target_folder),
        (loaded_head("eagle3", head_folder, target), head_folder),
    ):
        saved = load_file(folder / "model.safetensors")
        state = loaded.state_dict()
        assert state.keys() == saved.keys()
        assert all(torch.equal(state[name], saved[name]) for name in saved)
        assert not any(parameter.requires_grad for parameter in loaded.parameters())


@pytest.mark.parametrize("part", ["head", "target"])
def test_missing_and_misshapen_tensors_are_refused_by_name(
    part: str, head_folder: Path, target_folder: Path, target: CausalLM
) -> None:
    folder = head_folder if part == "head" else target_folder
    for name, tensor in load_file(folder / "model.safetensors").items():
        longer = rf"{name} has shape \[{len(tensor) + 1}.*asks for \[{len(tensor)}"
        for made, message in ((None, f"{name} is missing"), (torch.cat((tensor, tensor[:1])), longer)):
            change(folder, **{name: made})
            with pytest.raises(WeightMismatch, match=message):
                (prepare_eagle3(folder, target) if part == "head" else prepare_causal_lm(folder)).check()
        change(folder, **{name: tensor})


@pytest.mark.parametrize(
    ("part", "name"),
    [
        ("head", "midlayer.self_attn.q_proj.bias"),
        ("head", "layers.1.mlp.up_proj.weight"),
        ("head", "fc2.weight"),
        ("target", "model.layers.5.mlp.up_proj.weight"),
        ("target", "model.layers.0.self_attn.q_proj.bias"),
    ],
)
def test_extra_tensors_are_refused_by_name(
    part: str, name: str, head_folder: Path, target_folder: Path, target: CausalLM
) -> None:
    change(head_folder if part == "head" else target_folder, **{name: torch.zeros(3)})
    with pytest.raises(WeightMismatch, match=f"{name} is not part of this model"):
        loaded_head("eagle3", head_folder, target) if part == "head" else load_target(target_folder)


NORM = torch.ones(32)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("d2t", torch.zeros(DRAFT_VOCABULARY), "d2t has dtype"),
        ("d2t", torch.full((DRAFT_VOCABULARY,), -1), "d2t maps outside"),
        ("d2t", torch.full((DRAFT_VOCABULARY,), 97), "d2t maps outside"),
        ("norm.weight", NORM.index_fill(0, torch.tensor([3]), torch.nan), r"norm\.weight holds NaN or infinity"),
        ("norm.weight", NORM.index_fill(0, torch.tensor([3]), torch.inf), r"norm\.weight holds NaN or infinity"),
        ("norm.weight", NORM.to(torch.float8_e4m3fn), r"norm\.weight has dtype F8_E4M3; only matrices of targets"),
        ("model.fc.weight", torch.zeros(32, 96), r"fc\.weight and model\.fc\.weight are the same tensor"),
    ],
)
def test_a_head_with_a_wrong_tensor_is_refused(
    name: str, tensor: Tensor, message: str, head_folder: Path, target: CausalLM
) -> None:
    change(head_folder, **{name: tensor})
    with pytest.raises(WeightMismatch, match=message):
        loaded_head("eagle3", head_folder, target)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("target_hidden_size", 64, "hidden_size 64, this target has 32"),
        ("vocab_size", 98, "vocab_size is 98, the target's 97"),
        ("num_hidden_layers", 65, r"num_hidden_layers must be an integer in 1\.\.64, got 65"),
        ("eagle_aux_hidden_state_layer_ids", [0, 2, 6], "do not name 3 of the target's layers"),
        ("eagle_aux_hidden_state_layer_ids", [0, "2"], "must be integers"),
        ("num_aux_hidden_states", 2, "do not name 2 of the target's layers"),
        ("parallel_drafting", True, "parallel_drafting True is not supported"),
        ("speculators_model_type", "eagle", "'eagle' is no eagle3 head"),
        ("eagle_config", {"use_aux_hidden_state": 1}, "eagle_config: use_aux_hidden_state must be true or false"),
    ],
)
def test_a_head_for_another_target_is_refused(
    field: str, value: object, message: str, head_folder: Path, target: CausalLM
) -> None:
    change(head_folder, {field: value})
    with pytest.raises(ConfigMismatch, match=message):
        loaded_head("eagle3", head_folder, target)


@pytest.mark.parametrize("prefix", ["layers.0.", "model.layers.0.", "midlayer.0."])
def test_heads_of_other_families_are_renamed(prefix: str, head_folder: Path, target: CausalLM) -> None:
    """Layer names of speculators, NeMo and TensorRT-LLM load; a ``t2d`` that agrees with ``d2t`` is accepted."""
    wanted = loaded_head("eagle3", head_folder, target).state_dict()
    tensors = load_file(head_folder / "model.safetensors")
    renamed = {name.replace("midlayer.", prefix): tensor for name, tensor in tensors.items()}
    save_file(renamed | {"t2d": t2d_mask(tensors["d2t"])}, head_folder / "model.safetensors")
    loaded = loaded_head("eagle3", head_folder, target).state_dict()
    assert all(torch.equal(loaded[name], wanted[name]) for name in wanted)


def t2d_mask(d2t: Tensor) -> Tensor:
    """Return the ``t2d`` mask that matches ``d2t``."""
    mask = torch.zeros(97, dtype=torch.bool)
    mask[torch.arange(len(d2t)) + d2t] = True
    return mask


def test_maps_that_disagree_are_refused(head_folder: Path, target: CausalLM) -> None:
    t2d = t2d_mask(load_file(head_folder / "model.safetensors")["d2t"])
    for wrong in (3, 90):
        changed = t2d.clone()
        changed[wrong] = ~changed[wrong]
        change(head_folder, t2d=changed)
        with pytest.raises(WeightMismatch, match=f"t2d and d2t disagree on target token {wrong}"):
            loaded_head("eagle3", head_folder, target)
    change(head_folder, t2d=t2d[:-1])
    with pytest.raises(WeightMismatch, match="t2d has 96 entries"):
        loaded_head("eagle3", head_folder, target)


def test_maps_may_be_stored_in_other_integers(head_folder: Path, target: CausalLM) -> None:
    d2t = load_file(head_folder / "model.safetensors")["d2t"]
    change(head_folder, d2t=d2t.to(torch.int32), t2d=t2d_mask(d2t).to(torch.uint8))
    loaded = loaded_head("eagle3", head_folder, target).d2t
    assert loaded.dtype == torch.int64
    assert torch.equal(loaded, d2t)


def test_a_draft_model_with_infinite_weights_is_refused(target_folder: Path) -> None:
    name, weights = next(iter(load_file(target_folder / "model.safetensors").items()))
    weights.view(-1)[-1] = float("-inf")
    change(target_folder, **{name: weights})
    with pytest.raises(WeightMismatch, match=f"{re.escape(name)} holds NaN or infinity"):
        fill_causal_lm(prepare_causal_lm(target_folder), dtype=torch.float32, device=CPU, finite=True)
    load_causal_lm(target_folder, dtype=torch.float32, device=CPU)


def test_a_head_may_bring_its_own_embeddings(head_folder: Path, target: CausalLM) -> None:
    own = torch.full((97, 32), 0.5)
    shared = loaded_head("eagle3", head_folder, target)
    change(head_folder, **{"embed_tokens.weight": own})
    brought = loaded_head("eagle3", head_folder, target)
    assert brought.state_dict().keys() - shared.state_dict().keys() == {"embed_tokens.weight"}
    hidden, tokens = torch.ones(4, 32), torch.tensor([3, 1, 4, 1])
    wanted = brought(hidden, tokens, torch.arange(4), dense)
    assert not torch.equal(shared(hidden, tokens, torch.arange(4), dense), wanted)
    target.model.embed_tokens.weight.fill_(0.5)
    assert torch.equal(shared(hidden, tokens, torch.arange(4), dense), wanted)
    change(head_folder, **{"embed_tokens.weight": own[:50]})
    with pytest.raises(WeightMismatch, match=r"embed_tokens\.weight has shape \[50, 32\]"):
        loaded_head("eagle3", head_folder, target)


@pytest.fixture
def full_head(shape: dict[str, Any], tmp_path: Path) -> Path:
    """Return the folder of a head with the vocabulary of the target."""
    return write_head(tmp_path / "full", target=shape, draft_vocab_size=97)


def test_a_head_with_the_targets_vocabulary_needs_no_map(full_head: Path, target: CausalLM) -> None:
    change(full_head, d2t=None)
    assert loaded_head("eagle3", full_head, target).target_ids.tolist() == list(range(97))
    change(full_head, d2t=torch.arange(97).flip(0) - torch.arange(97))
    with pytest.raises(WeightMismatch, match="d2t moves tokens"):
        loaded_head("eagle3", full_head, target)


@pytest.mark.parametrize("map_is_stored", [True, False])
def test_a_head_without_output_matrix_uses_the_targets(
    full_head: Path, target: CausalLM, target_folder: Path, map_is_stored: bool
) -> None:
    change(full_head, **{"lm_head.weight": target.lm_head.weight.detach().clone()})
    wanted = loaded_head("eagle3", full_head, target)
    change(full_head, **{"lm_head.weight": None, **({} if map_is_stored else {"d2t": None})})
    check_draft("eagle3", full_head, target_folder)
    loaded = loaded_head("eagle3", full_head, target)
    hidden_TE = torch.randn(3, 32)
    assert torch.equal(loaded.logits(hidden_TE), wanted.logits(hidden_TE))
    assert loaded.lm_head.weight.data_ptr() == target.lm_head.weight.data_ptr(), "it takes no memory of its own"
    loaded.double()
    assert target.lm_head.weight.dtype == torch.float32, "a head that is trained leaves the target as it is"


OLDER = 91


@pytest.mark.parametrize("known", [OLDER, 40])
def test_a_head_from_before_the_vocabulary_grew_loads(
    full_head: Path, target: CausalLM, target_folder: Path, known: int
) -> None:
    """It has the older size in its config and t2d, and proposes tokens of that size alone."""
    chosen = torch.arange(known) * (OLDER // known)
    sizes = {"vocab_size": OLDER, "draft_vocab_size": known}
    d2t = chosen - torch.arange(known)
    output = load_file(full_head / "model.safetensors")["lm_head.weight"][:known].clone()
    change(full_head, sizes, **{"lm_head.weight": output, "d2t": d2t, "t2d": t2d_mask(d2t)[:OLDER]})
    check_draft("eagle3", full_head, target_folder)
    loaded = loaded_head("eagle3", full_head, target)
    assert torch.equal(loaded.target_ids, chosen)
    assert loaded.logits(torch.randn(2, 32)).shape == (2, known)
    change(full_head, d2t=d2t + OLDER)
    with pytest.raises(WeightMismatch, match=r"maps outside|must be 0"):
        loaded_head("eagle3", full_head, target)


def test_a_head_of_another_vocabulary_is_refused(full_head: Path, target: CausalLM) -> None:
    rows, sizes = torch.randn(OLDER, 32), {"vocab_size": OLDER, "draft_vocab_size": OLDER}
    change(full_head, sizes, **{"embed_tokens.weight": rows, "lm_head.weight": rows.clone(), "d2t": None})
    with pytest.raises(WeightMismatch, match=r"embed_tokens\.weight has 91 rows"):
        loaded_head("eagle3", full_head, target)


def test_a_head_of_20_gigabytes_by_its_header_is_refused_unread(head_folder: Path, target: CausalLM) -> None:
    """The file is sparse: it has the size that its header says, and no content."""
    change(head_folder, **{"lm_head.weight": None})
    path, claimed = head_folder / "model.safetensors", 20 * 10**9
    length = int.from_bytes(path.read_bytes()[:8], "little")
    header, data = json.loads(path.read_bytes()[8 : 8 + length]), path.read_bytes()[8 + length :]
    offsets = [len(data), len(data) + claimed]
    header["lm_head.weight"] = {"dtype": "F32", "shape": [10**7, 500], "data_offsets": offsets}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text + data)
        file.truncate(8 + len(text) + offsets[1])
    with pytest.raises(WeightMismatch, match=r"lm_head\.weight has shape \[10000000, 500\]"):
        loaded_head("eagle3", head_folder, target)


def test_tied_targets_may_or_may_not_repeat_the_matrix(target: CausalLM, shape: dict[str, Any], tmp_path: Path) -> None:
    tensors = target.state_dict()
    config = shape | {"tie_word_embeddings": True}
    without = load_target(write(tmp_path / "a", config, {k: v for k, v in tensors.items() if k != "lm_head.weight"}))
    copied = tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]}
    repeated = load_target(write(tmp_path / "b", config, copied))
    for model in (without, repeated):
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert torch.equal(model.lm_head.weight, tensors["model.embed_tokens.weight"])


def test_another_output_matrix_in_a_tied_checkpoint_is_used(
    target: CausalLM, shape: dict[str, Any], tmp_path: Path
) -> None:
    loaded = load_target(write(tmp_path, shape | {"tie_word_embeddings": True}, target.state_dict()))
    assert not loaded.config.tie_word_embeddings, "engine and memory plan count both matrices"
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        assert torch.equal(loaded.state_dict()[name], target.state_dict()[name])


def test_weights_in_several_files_load_without_old_rotary_frequencies(target_folder: Path) -> None:
    tensors = load_file(target_folder / "model.safetensors")
    wanted = load_target(target_folder).state_dict()
    names = sorted(tensors)
    old = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}
    save_file({n: tensors[n] for n in names[:10]} | old, target_folder / "model-00001-of-00002.safetensors")
    save_file({n: tensors[n] for n in names[10:]}, target_folder / "model-00002-of-00002.safetensors")
    (target_folder / "model.safetensors").unlink()
    loaded = load_target(target_folder).state_dict()
    assert all(torch.equal(loaded[name], wanted[name]) for name in wanted)


def test_other_formats_are_not_read(target_folder: Path) -> None:
    (target_folder / "model.safetensors").rename(target_folder / "pytorch_model.bin")
    with pytest.raises(WeightMismatch, match=r"holds no \*\.safetensors"):
        load_target(target_folder)


def test_hash_covers_every_weight_and_the_config(target_folder: Path) -> None:
    hashes = {model_hash(target_folder)}
    change(target_folder, **{"model.norm.weight": torch.full((32,), 1.5)})
    hashes.add(model_hash(target_folder))
    (target_folder / "config.json").write_text((target_folder / "config.json").read_text() + "\n")
    hashes.add(model_hash(target_folder))
    assert len(hashes) == 3


def test_rotary_tables_have_a_row_for_each_served_position(shape: dict[str, Any], target_folder: Path) -> None:
    whole, short = (
        load_causal_lm(target_folder, dtype=torch.float32, device=CPU, max_model_len=length) for length in (None, 100)
    )
    assert [len(one.rope.cos_PD) for one in (whole, short)] == [256, 100]
    tokens_T, positions_T = torch.arange(9), torch.arange(91, 100)
    hidden = [one(tokens_T, positions_T, dense).hidden_TE for one in (whole, short)]
    assert torch.equal(*hidden)
    yarn = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}
    heads = [eagle3_config({**shape, "rope_parameters": yarn}, one.config) for one in (whole, short)]
    assert heads[0].rope_scaling == heads[1].rope_scaling, "training knew no limit of a worker"
    assert heads[1].max_position_embeddings == 100


def test_hash_is_taken_from_the_manifest_unless_a_file_is_newer(tmp_path: Path) -> None:
    contents = {"config.json": b"{}", "model.safetensors": b"weights"}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    hashed = model_hash(tmp_path)
    files = [{"name": name, "size": len(content), "digest": hashlib.sha256(content).hexdigest()}
             for name, content in contents.items()]  # fmt: skip
    (tmp_path / MANIFEST).write_text(json.dumps({"files": files}))
    assert model_hash(tmp_path) == hashed
    weights, linked = tmp_path / "model.safetensors", tmp_path / "linked"
    linked.mkdir()
    for name in contents:
        (linked / name).symlink_to(tmp_path / name)
    before = weights.stat()
    weights.write_bytes(b"WEIGHTS")
    assert len({hashed, model_hash(tmp_path), model_hash(linked)}) == 2, "a newer file is read"
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert hashed == model_hash(tmp_path) == model_hash(linked), "an older one is not"
    weights.write_bytes(b"longer weights")
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert model_hash(tmp_path) != hashed


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
