"""Tests of loading a draft by its method, including folders of another method, and of its vocabulary.

Two tokenizers are compared, and draft models are resized to their target's vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdecode_worker.contract import DraftConfig
from specdecode_worker.drafts.draft_files import draft_hash
from specdecode_worker.models.arch import causal_lm_config
from specdecode_worker.models.causal_lm import CausalLM
from specdecode_worker.models.config import (
    CausalLMConfig,
    DFlashConfig,
    Eagle3Config,
    EagleConfig,
    MedusaConfig,
    PEagleConfig,
)
from specdecode_worker.models.dflash import DFlashHead
from specdecode_worker.models.drafts import Draft, WeightMethod, expect_vocabulary, fit_vocabulary, load_draft
from specdecode_worker.models.eagle import Eagle3Head, EagleHead, PEagleHead
from specdecode_worker.models.errors import ConfigMismatch, VocabularyMismatch, WeightMismatch
from specdecode_worker.models.headers import infer_method, read_tensor_headers
from specdecode_worker.models.medusa import MedusaHeads
from specdecode_worker.models.optimize import fuse
from support.worker.checkpoints import CPU, check_draft, write, write_heads
from support.worker.dense_attention import dense
from support.worker.small_folders import randomise
from support.worker.tokens import saved, tokenizer

METHODS: dict[WeightMethod, tuple[type, type, str]] = {
    "eagle3": (Eagle3Head, Eagle3Config, "an EAGLE-3 head"),
    "peagle": (PEagleHead, PEagleConfig, "a P-EAGLE head"),
    "dflash": (DFlashHead, DFlashConfig, "a DFlash head"),
    "eagle": (EagleHead, EagleConfig, "an EAGLE-1"),
    "medusa": (MedusaHeads, MedusaConfig, "a Medusa"),
    "draft-model": (CausalLM, CausalLMConfig, "a whole model"),
}
"""Network and config of each method, and what errors call it."""
Folders = dict[WeightMethod, Path]
Load = Callable[..., Draft]


def of_a_model(shape: dict[str, Any], seed: int) -> dict[str, torch.Tensor]:
    model = CausalLM(causal_lm_config(shape)).requires_grad_(False)
    randomise(model, seed)
    return model.state_dict()


@pytest.fixture
def target_folder(target: CausalLM, shape: dict[str, Any], tmp_path: Path) -> Path:
    return saved(write(tmp_path / "target", shape, target.state_dict()), tokenizer())


@pytest.fixture
def folders(shape: dict[str, Any], tmp_path: Path) -> Folders:
    small = shape | {"num_hidden_layers": 2, "vocab_size": 90, "max_position_embeddings": 64}
    draft_model = saved(write(tmp_path / "small", small, of_a_model(small, 3)), tokenizer())
    return {**write_heads(tmp_path, shape), "draft-model": draft_model}


@pytest.fixture
def load(target: CausalLM, target_folder: Path) -> Load:
    def load_method(method: WeightMethod, folder: Path) -> Draft:
        return load_draft(method, folder, target, target_folder=target_folder, dtype=torch.float32, device=CPU)

    return load_method


@pytest.mark.parametrize("method", METHODS)
def test_each_method_loads_its_own_network(
    method: WeightMethod, folders: Folders, load: Load, target_folder: Path
) -> None:
    network, config, _ = METHODS[method]
    loaded = load(method, folders[method])
    assert isinstance(loaded, network)
    assert isinstance(loaded.config, config)
    assert infer_method(read_tensor_headers(folders[method])) == method
    check_draft(method, folders[method], target_folder)


@pytest.mark.parametrize(("method", "asked"), list(permutations(METHODS, 2)))
def test_draft_of_another_method_is_refused(
    method: WeightMethod, asked: WeightMethod, folders: Folders, load: Load, target_folder: Path
) -> None:
    word = METHODS[method][-1]
    with pytest.raises(ConfigMismatch, match=rf"this is {word}.*, set method: {method} \(it is {asked}\)"):
        load(asked, folders[method])
    with pytest.raises(ConfigMismatch, match=f"set method: {method}"):
        check_draft(asked, folders[method], target_folder)


def test_folder_without_a_draft_is_refused(load: Load, tmp_path: Path) -> None:
    folder = write(tmp_path / "x", {}, {"conv.weight": torch.zeros(3)})
    with pytest.raises(WeightMismatch, match="holds no draft that is known"):
        load("eagle3", folder)


def test_draft_is_checked_without_reading_weights(
    folders: Folders, target_folder: Path, target: CausalLM, load: Load
) -> None:
    """`check_draft` finds every error of `load_draft` except invalid values of weights."""
    path = folders["eagle3"] / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {"norm.weight": torch.full((32,), torch.nan)}, path)
    check_draft("eagle3", folders["eagle3"], target_folder)
    with pytest.raises(WeightMismatch, match=r"norm\.weight holds NaN"):
        load("eagle3", folders["eagle3"])
    save_file(tensors | {"norm.weight": torch.ones(31)}, path)
    with pytest.raises(WeightMismatch, match=r"norm\.weight has shape \[31\]"):
        check_draft("eagle3", folders["eagle3"], target_folder)


def test_heads_load_for_a_fused_target(folders: Folders, load: Load, target: CausalLM) -> None:
    """A head can be loaded for a fused target, as in a draft swap of a running engine."""
    states, tokens, slots = torch.ones(2, 32), torch.tensor([5, 6]), torch.tensor([1, 2])
    before = load("eagle", folders["eagle"])
    assert isinstance(before, EagleHead)
    wanted = before.logits(before(states, tokens, slots, dense))
    fuse(target)
    for network in (before, load("eagle", folders["eagle"])):
        assert isinstance(network, EagleHead)
        torch.testing.assert_close(network.logits(network(states, tokens, slots, dense)), wanted)
    assert isinstance(load("eagle3", folders["eagle3"]), Eagle3Head)


def test_draft_model_with_other_added_tokens_is_resized(folders: Folders, load: Load, target_folder: Path) -> None:
    saved(folders["draft-model"], tokenizer(special=("<end>",)))
    draft = load("draft-model", folders["draft-model"])
    assert isinstance(draft, CausalLM)
    assert (draft.config.vocab_size, draft.config.max_position_embeddings) == (97, 64)
    out = draft(torch.tensor([96]), torch.tensor([63]), dense)
    assert draft.logits(out.hidden_TE).shape == (1, 97)
    check_draft("draft-model", folders["draft-model"], target_folder)


@pytest.mark.parametrize("method", METHODS)
def test_a_draft_with_the_tokenizer_of_another_target_is_refused(
    method: WeightMethod, folders: Folders, load: Load, target_folder: Path
) -> None:
    saved(folders[method], tokenizer(special=("<eos>", "<more>")))
    load(method, folders[method])
    saved(folders[method], tokenizer(extra=("yak", "zebra")))
    message = "token 261 is 'zebra' to the draft and nothing to the target; take a draft with the target's tokenizer"
    with pytest.raises(VocabularyMismatch, match=message):
        load(method, folders[method])
    with pytest.raises(VocabularyMismatch, match=message):
        check_draft(method, folders[method], target_folder)


def test_the_hash_of_a_draft_model_covers_its_tokenizer(folders: Folders) -> None:
    """A swapped tokenizer makes another draft, which is checked again. Heads have no tokenizer."""
    hashes = {method: set[str]() for method in ("draft-model", "eagle3")}
    for special in (("<eos>",), ("<end>",)):
        for method, seen in hashes.items():
            saved(folders[method], tokenizer(special=special))
            config = DraftConfig.model_validate({"method": method, "uri": str(folders[method])})
            seen.add(draft_hash(config, Path))
    assert [len(seen) for seen in hashes.values()] == [2, 1]


def test_a_windowed_model_may_serve_short_texts(
    shape: dict[str, Any], target: CausalLM, target_folder: Path, tmp_path: Path
) -> None:
    config = shape | {"architectures": ["MistralForCausalLM"], "sliding_window": 64}
    folder = saved(write(tmp_path / "m", config, of_a_model(shape, 3)), tokenizer())
    with pytest.raises(ConfigMismatch, match="sliding_window 64"):
        check_draft("draft-model", folder, target_folder)
    check_draft("draft-model", folder, target_folder, max_model_len=64)


TOKENS = torch.randint(0, 90, (11,), generator=torch.Generator().manual_seed(4))


def test_only_a_head_may_come_without_a_tokenizer(tmp_path: Path) -> None:
    target = saved(tmp_path / "a", tokenizer())
    expect_vocabulary("eagle3", tmp_path, target)
    with pytest.raises(VocabularyMismatch, match=r"tokenizer\.json does not exist"):
        expect_vocabulary("draft-model", tmp_path, target)


def test_rules_padding_and_truncation_of_a_tokenizer_may_differ(tmp_path: Path) -> None:
    """The draft reads the target's tokens, however its own tokenizer would have split the text."""
    cut = tokenizer(lowercase=True)
    cut.enable_truncation(3)
    expect_vocabulary("draft-model", saved(tmp_path / "b", cut), saved(tmp_path / "a", tokenizer()))


def test_an_unreadable_tokenizer_is_refused(tmp_path: Path) -> None:
    target = saved(tmp_path / "a", tokenizer())
    for junk in ("", "{}", "[1, 2", "\x00", '{"model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}}'):
        (tmp_path / "tokenizer.json").write_text(junk)
        with pytest.raises(VocabularyMismatch, match=r"tokenizer\.json cannot be read"):
            expect_vocabulary("draft-model", tmp_path, target)


@torch.inference_mode()
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("size", [90, 97, 120])
def test_fitting_preserves_the_logits_of_common_tokens(size: int, tied: bool, shape: dict[str, Any]) -> None:
    draft = CausalLM(causal_lm_config(shape | {"tie_word_embeddings": tied})).requires_grad_(False)
    randomise(draft, 5)

    def logits() -> torch.Tensor:
        return draft.logits(draft(TOKENS, torch.arange(11), dense).hidden_TE)

    before = logits()
    fit_vocabulary(draft, size)
    after = logits()
    both = min(size, 97)
    assert after.shape == (11, size)
    torch.testing.assert_close(after[:, :both], before[:, :both])
    assert after[:, 97:].eq(0).all()
    assert draft.config.vocab_size == size
    assert (draft.lm_head.weight is draft.model.embed_tokens.weight) == tied
    assert draft(torch.tensor([size - 1]), torch.tensor([0]), dense).hidden_TE.isfinite().all()
