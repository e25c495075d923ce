"""Tests of quantized layers of targets and drafts, and that stored and dequantized weights compute the same."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from specdecode_kernels.quantised_linear.reference import KINDS, Kind, dequantise, quantise
from specdecode_worker.models.arch import causal_lm_config
from specdecode_worker.models.causal_lm import CausalLM
from specdecode_worker.models.config import eagle3_config
from specdecode_worker.models.eagle import Eagle3Head
from specdecode_worker.models.errors import ConfigMismatch
from specdecode_worker.models.linear import QuantizedWeight
from specdecode_worker.models.optimize import (
    added_bytes,
    fuse,
    quantise_draft,
    quantise_target,
)
from support.worker.dense_attention import dense
from support.worker.small_folders import randomise

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
TOKENS = torch.randint(0, 97, (9,), generator=torch.Generator().manual_seed(4))


@pytest.fixture(params=[False, True], ids=["untied", "tied"])
def target(request: pytest.FixtureRequest, shape: dict[str, Any]) -> CausalLM:
    """Return a target with all optional biases."""
    config = causal_lm_config(shape | {"tie_word_embeddings": request.param, "attention_bias": True, "mlp_bias": True})
    model = CausalLM(config).requires_grad_(False)
    randomise(model, 1)
    return model.double()


@pytest.fixture
def head(target: CausalLM, shape: dict[str, Any]) -> Eagle3Head:
    config = eagle3_config(shape | {"num_hidden_layers": 2, "draft_vocab_size": 40}, target.config)
    eagle3_head = Eagle3Head(config, target.model.embed_tokens).requires_grad_(False)
    randomise(eagle3_head, 2)
    return eagle3_head.double()


def logits(model: CausalLM, dense: Any) -> Tensor:
    return model.logits(model(TOKENS, torch.arange(len(TOKENS)), dense).hidden_TE)


def drafted(head: Eagle3Head, dense: Any) -> Tensor:
    aux = torch.randn(len(TOKENS), 96, generator=torch.Generator().manual_seed(6)).double()
    return head.logits(head(head.fuse(aux), TOKENS, torch.arange(len(TOKENS)), dense))


def quantised(model: nn.Module) -> set[str]:
    return {name.split(".")[-2] for name, module in model.named_modules() if isinstance(module, QuantizedWeight)}


def state_bytes(model: nn.Module) -> int:
    tensors = {id(tensor): tensor for tensor in model.state_dict(keep_vars=True).values()}
    return sum(tensor.nbytes for tensor in tensors.values() if tensor.dtype != torch.int64)


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_only_the_blocks_of_a_target_are_quantised(target: CausalLM, kind: Kind) -> None:
    before, embedding = logits(target, dense), target.model.embed_tokens.weight.clone()
    rounded = copy.deepcopy(target)
    quantise_target(target, kind, CPU, stored=True)
    quantise_target(rounded, kind, CPU)
    attention = {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert quantised(target) == attention | {"gate_proj", "up_proj", "down_proj"}
    assert not quantised(rounded)
    wanted = logits(rounded, dense)
    assert not torch.allclose(wanted, before, atol=1e-6)
    torch.testing.assert_close(logits(target, dense), wanted, atol=1e-12, rtol=1e-12)
    fuse(target)
    assert quantised(target) == {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}
    torch.testing.assert_close(logits(target, dense), wanted, atol=1e-12, rtol=1e-12)
    assert torch.equal(target.model.embed_tokens.weight, embedding)


@pytest.mark.parametrize("kind", KINDS)
def test_mlps_and_head_of_a_draft_are_quantised(head: Eagle3Head, kind: Kind) -> None:
    before, rounded = drafted(head, dense), copy.deepcopy(head)
    quantise_draft(head, kind, stored=True)
    quantise_draft(rounded, kind)
    assert quantised(head) == {"gate_proj", "up_proj", "down_proj", "lm_head"}
    assert not torch.allclose(drafted(rounded, dense), before, atol=1e-6)
    fuse(head)
    torch.testing.assert_close(drafted(head, dense), drafted(rounded, dense), atol=1e-12, rtol=1e-12)


def test_tied_embeddings_are_not_quantised(target: CausalLM) -> None:
    """A tied embedding is not quantized with the lm_head of a draft model."""
    embedding = target.model.embed_tokens.weight.clone()
    quantise_draft(target, "int4")
    assert torch.equal(target.model.embed_tokens.weight, embedding)
    lm_head = target.lm_head.weight
    assert not torch.equal(lm_head, embedding)
    if target.config.tie_word_embeddings:
        assert torch.equal(lm_head, dequantise(quantise(embedding, "int8"), torch.float64))


def test_int4_draft_has_an_int8_head(head: Eagle3Head) -> None:
    quantise_draft(head, "int4", stored=True)
    kinds = {name.split(".")[-2]: part.kind for name, part in head.named_modules() if isinstance(part, QuantizedWeight)}
    assert kinds.pop("lm_head") == "int8"
    assert set(kinds.values()) == {"int4"}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("device", [CPU, CUDA], ids=str)
def test_predicted_bytes_are_exact(target: CausalLM, head: Eagle3Head, kind: Kind, device: torch.device) -> None:
    """`added_bytes` is exact for a target, a head and a draft model, including a tied matrix that is duplicated."""
    on_gpu = device == CUDA
    for model, draft in ((copy.deepcopy(target), False), (head, True), (target, True)):
        before = state_bytes(model)
        predicted = added_bytes(model, kind, torch.float64, device, draft=draft)
        if draft:
            quantise_draft(model, kind, stored=on_gpu)
        else:
            quantise_target(model, kind, CPU, stored=on_gpu)
        assert state_bytes(model) - before == predicted


def test_the_packed_output_matrix_of_a_target_stays_as_it_is(target: CausalLM, head: Eagle3Head) -> None:
    """A head without an lm_head shares the target's, which may no longer be plain."""
    target.lm_head = target.lm_head.quantize("int8", CPU, stored=True)
    head.lm_head = target.lm_head
    quantise_draft(head, "int8", stored=True)
    assert head.lm_head is target.lm_head
    assert quantised(head) == {"gate_proj", "up_proj", "down_proj", "lm_head"}


def test_no_quantization_by_default(target: CausalLM) -> None:
    before = logits(target, dense)
    quantise_target(target, None, CPU)
    quantise_draft(target, None)
    assert torch.equal(logits(target, dense), before)
    assert added_bytes(target, None, torch.float32, CUDA, draft=True) == 0


def test_gpu_without_fp8_is_refused(target: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(ConfigMismatch, match="take int8"):
        quantise_target(target, "fp8", CUDA)
