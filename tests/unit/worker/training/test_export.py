"""Exported drafts load with their tensor names: three families of EAGLE-3 heads, EAGLE-1, Medusa and a draft model.

The vocabulary of a draft is chosen for the domain that it covers worst.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from specdecode_worker.commands import train
from specdecode_worker.models.causal_lm import CausalLM
from specdecode_worker.models.drafts import WeightMethod
from specdecode_worker.models.eagle import Eagle3Head
from specdecode_worker.models.weights import load_causal_lm
from specdecode_worker.training.acceptance import target_token_ranks
from specdecode_worker.training.artifacts import Ancestor, Names, write_draft, write_head
from specdecode_worker.training.conversations import (
    Conversation,
    choose,
    domain_probabilities,
    shard_paths,
    uncovered,
    write_shard,
)
from specdecode_worker.training.errors import DraftNotTrainable
from specdecode_worker.training.heads import head_config, new_head, new_peagle, prepare_eagle3_head
from specdecode_worker.training.recipe import DraftSettings
from specdecode_worker.training.split_target import TargetPlacement
from support.training_fixtures import CONFIG, MAKERS, shaken
from support.worker.small_folders import loaded_head

CPU = torch.device("cpu")
LAYER = {
    *(f"self_attn.{name}_proj.weight" for name in "qkvo"),
    *(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
    "hidden_norm.weight",
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
}
PREFIX: dict[Names, str] = {"safeailab": "midlayer.", "speculators": "layers.0.", "nemo": "model.layers.0."}


@pytest.mark.parametrize("names", get_args(Names))
def test_a_head_has_the_tensors_and_fields_of_its_family(head: Eagle3Head, names: Names, tmp_path: Path) -> None:
    write_head(head, tmp_path, names)
    tensors = load_file(tmp_path / "model.safetensors")
    outside = {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"}
    assert set(tensors) == outside | {PREFIX[names] + name for name in LAYER}
    assert tensors["fc.weight"].shape == (32, 96)
    assert tensors[PREFIX[names] + "self_attn.q_proj.weight"].shape == (32, 64), "queries of input 2H"
    assert tensors["lm_head.weight"].shape == (32, 32)
    assert (tensors["d2t"].dtype, tensors["t2d"].dtype) == (torch.int64, torch.bool)
    offsets = torch.arange(32) + tensors["d2t"]
    assert offsets.tolist() == tensors["t2d"].nonzero().flatten().tolist() == list(range(0, 64, 2))
    config = json.loads((tmp_path / "config.json").read_text())
    layer: dict[str, Any] = config.get("transformer_layer_config", config)
    assert (layer["hidden_size"], layer["num_hidden_layers"], layer["vocab_size"]) == (32, 1, 64)
    assert (config["draft_vocab_size"], config["target_hidden_size"]) == (32, 32)
    assert config["norm_before_residual"] is False
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    assert ("speculators_model_type" in config) == (names == "speculators")


def expect_rounded(loaded: nn.Module, draft: nn.Module) -> None:
    """Expect the weights of a draft in bf16."""
    for name, tensor in draft.state_dict().items():
        rounded = tensor.to(torch.bfloat16).float() if tensor.is_floating_point() else tensor
        assert torch.equal(loaded.state_dict()[name], rounded), name


@pytest.mark.parametrize("names", get_args(Names))
def test_parallel_heads_of_all_families_draft_identically(names: Names, target: CausalLM, tmp_path: Path) -> None:
    head = shaken(new_peagle(target, torch.arange(0, 64, 2), 2))
    target_folder = tmp_path / "target"
    target_folder.mkdir()
    (target_folder / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"]}')
    write_draft(head, tmp_path, target_folder, names)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["mask_token_id"] == 63
    if names == "speculators":
        assert config["speculators_config"]["verifier"]["architectures"] == ["Qwen3ForCausalLM"]
    assert config.get("speculators_model_type") == ("peagle" if names == "speculators" else None)
    loaded = loaded_head("peagle", tmp_path, target)
    assert loaded.config == head.config
    expect_rounded(loaded, head)


@pytest.mark.parametrize("layers", [1, 2])
def test_heads_of_all_families_draft_identically(
    target: CausalLM, conversations: list[Conversation], layers: int, tmp_path: Path
) -> None:
    head = shaken(new_head(target, torch.arange(0, 64, 2), layers))
    assert isinstance(head, Eagle3Head)
    ranks = []
    for names in get_args(Names):
        write_head(head, tmp_path / names, names)
        loaded = loaded_head("eagle3", tmp_path / names, target)
        assert loaded.config == head.config
        ranks.append(torch.cat(target_token_ranks(loaded, conversations, target.lm_head.weight, 3)))
    assert torch.equal(ranks[0], ranks[1])
    assert torch.equal(ranks[0], ranks[2])
    assert len(ranks[0].unique()) > 3


def test_all_files_of_a_head_are_readable_by_other_users(head: Eagle3Head, tmp_path: Path) -> None:
    """A draft is trained by one user, for example root, and served by another."""
    write_head(head, tmp_path)
    files = list(tmp_path.iterdir())
    assert {file.name for file in files} >= {"config.json", "model.safetensors"}
    assert all(file.stat().st_mode & 0o044 == 0o044 for file in files)


def test_head_with_the_whole_vocabulary_has_no_token_maps(target: CausalLM, tmp_path: Path) -> None:
    write_head(new_head(target, torch.arange(64)), tmp_path)
    assert not {"d2t", "t2d"} & set(load_file(tmp_path / "model.safetensors"))
    loaded = loaded_head("eagle3", tmp_path, target)
    assert torch.equal(loaded.target_ids, torch.arange(64))


def test_other_methods_load_as_they_were_written(target: CausalLM, tmp_path: Path) -> None:
    model = tmp_path / "target"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG))
    (model / "tokenizer.json").write_text("{}")
    methods: tuple[WeightMethod, ...] = ("eagle", "dflash", "medusa", "draft-model")
    for method in methods:
        draft, folder = shaken(MAKERS[method](target, 4)), tmp_path / method
        write_draft(draft, folder, model)
        if method == "draft-model":
            expect_rounded(load_causal_lm(folder, dtype=torch.float32, device=CPU), draft)
        else:
            expect_rounded(loaded_head(method, folder, target), draft)
    assert (tmp_path / "draft-model" / "tokenizer.json").exists()


@pytest.mark.parametrize("layers", [1, 2])
def test_head_with_norms_and_layers_is_prepared_unchanged(
    target: CausalLM, conversations: list[Conversation], layers: int, tmp_path: Path
) -> None:
    config = replace(head_config(target.config, 32, layers), fc_norm=True, norm_output=True, norm_before_residual=True)
    head = Eagle3Head(config, target.model.embed_tokens)
    head.d2t.copy_(torch.arange(32))
    same = prepare_eagle3_head(head, target, torch.arange(0, 64, 2))
    write_head(same, tmp_path)
    loaded = loaded_head("eagle3", tmp_path, target)
    assert loaded.config == config
    before, after = (target_token_ranks(h, conversations, target.lm_head.weight, 2) for h in (head, same))
    for first, second in zip(before, after, strict=True):
        assert (first == second).float().mean() > 0.5


def test_appended_layers_do_not_change_the_draft(
    target: CausalLM, head: Eagle3Head, conversations: list[Conversation]
) -> None:
    deeper = prepare_eagle3_head(head, target, head.target_ids, layers=3)
    assert deeper.config.num_hidden_layers == 3
    before, after = (target_token_ranks(h, conversations, target.lm_head.weight, 2) for h in (head, deeper))
    for first, second in zip(before, after, strict=True):
        assert torch.equal(first, second)
    assert prepare_eagle3_head(deeper, target, head.target_ids, layers=1).config.num_hidden_layers == 3, (
        "none is dropped"
    )


def test_layers_that_a_draft_lacks_start_as_those_of_a_split_target(
    target: CausalLM, head: Eagle3Head, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No device has a whole layer to start from. The layers that the draft has need none."""
    monkeypatch.setattr(train, "load_causal_lm", lambda *_, **__: target)
    placement = TargetPlacement(folder=tmp_path, dtype="float32", device=CPU, size=2)
    for layers, whole in ((1, None), (2, target)):
        described = DraftSettings(target=Ancestor("", tmp_path, ""), origin=head, layers=layers)
        assert train._whole_target(placement, described) is whole
    assert train._whole_target(placement, DraftSettings(target=Ancestor("", tmp_path, ""))) is target


def test_a_head_of_other_layers_of_the_target_is_refused(target: CausalLM) -> None:
    config = replace(head_config(target.config, 32), aux_layers=(1, 3, 5))
    with pytest.raises(DraftNotTrainable, match=r"\[1, 3, 5\]"):
        prepare_eagle3_head(Eagle3Head(config, target.model.embed_tokens), target, torch.arange(0, 64, 2))


def test_a_narrow_head_keeps_its_vocabulary(target: CausalLM) -> None:
    config = replace(head_config(target.config, 32), hidden_size=16)
    head = Eagle3Head(config, torch.nn.Embedding(64, 16), own_embedding=True)
    head.d2t.copy_(torch.arange(32))
    prepared = prepare_eagle3_head(head, target, head.target_ids)
    assert torch.equal(prepared.lm_head.weight, head.lm_head.weight)
    assert prepared.embed_tokens is not None
    with pytest.raises(DraftNotTrainable, match="hidden_size 16"):
        prepare_eagle3_head(head, target, torch.arange(32))
    with pytest.raises(DraftNotTrainable, match="leave --layers out"):
        prepare_eagle3_head(head, target, head.target_ids, layers=2)


def test_domain_probabilities_are_the_mean_target_probabilities(
    target: CausalLM, conversations: list[Conversation], tmp_path: Path
) -> None:
    write_shard(tmp_path, 0, conversations)
    probabilities = domain_probabilities(shard_paths(tmp_path), target.lm_head.weight, every=1)
    assert list(probabilities) == ["code", "prose"]
    for domain, mass_V in probabilities.items():
        mine = [c.hidden_NE[c.answer_start :] for c in conversations if c.domain == domain]
        expected = torch.softmax(target.logits(torch.cat(mine)), dim=-1).mean(dim=0).double()
        torch.testing.assert_close(mass_V, expected, atol=1e-6, rtol=1e-4)


def test_vocabulary_choice_covers_a_rare_domain() -> None:
    # Eight domains share their tokens. The ninth has tokens of its own, which a choice by the mean leaves out.
    common, special = torch.zeros(400, dtype=torch.float64), torch.zeros(400, dtype=torch.float64)
    common[:200], special[200:] = 1 / torch.arange(1, 201), 1 / torch.arange(1, 201)
    probabilities_by_domain = {f"common {i}": common / common.sum() for i in range(8)} | {
        "special": special / special.sum()
    }
    by_mean = torch.stack(list(probabilities_by_domain.values())).mean(dim=0).topk(100).indices
    chosen = choose(probabilities_by_domain, 100)
    assert chosen.tolist() == sorted(set(chosen.tolist()))
    assert len(chosen) == 100
    after, before = uncovered(probabilities_by_domain, chosen), uncovered(probabilities_by_domain, by_mean)
    assert max(before.values()) > 0.4
    # The fair choice gives half of the vocabulary to each of the two sets of tokens.
    fair = 1 - float((common / common.sum())[:50].sum())
    assert max(after.values()) == pytest.approx(fair, abs=0.02)
