"""Tests that fused, packed and quantized networks compute what the plain ones do, or those with rounded weights."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from specdecode_kernels.cpu.native import library
from specdecode_kernels.quantised_linear.reference import KINDS, Kind, dequantise, quantise
from specdecode_worker.models import compiled_cpu, linear
from specdecode_worker.models.arch import causal_lm_config
from specdecode_worker.models.causal_lm import CausalLM
from specdecode_worker.models.compiled_cpu import NativeBlock, NativeMidlayer
from specdecode_worker.models.config import eagle3_config
from specdecode_worker.models.eagle import Eagle3Head
from specdecode_worker.models.errors import ConfigMismatch
from specdecode_worker.models.linear import CompiledWeight, Linear, OneDnnWeight, QuantizedWeight
from specdecode_worker.models.optimize import added_bytes, fuse, quantise_draft, quantise_target, should_pack
from specdecode_worker.models.target_states import TargetStates
from support.tiers import skip_reason
from support.worker.dense_attention import dense
from support.worker.small_folders import randomise

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


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


def quantised(model: nn.Module) -> dict[str, Kind]:
    """Return the kinds of the quantized matrices, by the last part of their names."""
    stored = {name: module for name, module in model.named_modules() if isinstance(module, QuantizedWeight)}
    return {name.split(".")[-2]: module.kind for name, module in stored.items()}


def state_bytes(model: nn.Module) -> int:
    tensors = {id(tensor): tensor for tensor in model.state_dict(keep_vars=True).values()}
    return sum(tensor.nbytes for tensor in tensors.values() if tensor.dtype != torch.int64)


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_only_the_blocks_of_a_target_are_quantised(target: CausalLM, kind: Kind) -> None:
    before, embedding = logits(target), target.model.embed_tokens.weight.clone()
    rounded = copy.deepcopy(target)
    quantise_target(target, kind, CPU, stored=True)
    quantise_target(rounded, kind, CPU)
    attention = {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert quantised(target).keys() == attention | {"gate_proj", "up_proj", "down_proj"}
    assert not quantised(rounded)
    wanted = logits(rounded)
    assert not torch.allclose(wanted, before, atol=1e-6)
    torch.testing.assert_close(logits(target), wanted, atol=1e-12, rtol=1e-12)
    fuse(target)
    assert quantised(target).keys() == {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}
    torch.testing.assert_close(logits(target), wanted, atol=1e-12, rtol=1e-12)
    assert torch.equal(target.model.embed_tokens.weight, embedding)


@pytest.mark.parametrize("kind", KINDS)
def test_mlps_and_head_of_a_draft_are_quantised(head: Eagle3Head, kind: Kind) -> None:
    before, rounded = drafted(head), copy.deepcopy(head)
    quantise_draft(head, kind, stored=True)
    quantise_draft(rounded, kind)
    assert quantised(head) == dict.fromkeys(("gate_proj", "up_proj", "down_proj"), kind) | {
        "lm_head": "int8" if kind == "int4" else kind
    }
    assert not torch.allclose(drafted(rounded), before, atol=1e-6)
    fuse(head)
    torch.testing.assert_close(drafted(head), drafted(rounded), atol=1e-12, rtol=1e-12)


def test_tied_embeddings_are_not_quantised(target: CausalLM) -> None:
    embedding = target.model.embed_tokens.weight.clone()
    quantise_draft(target, "int4")
    assert torch.equal(target.model.embed_tokens.weight, embedding)
    lm_head = target.lm_head.weight
    assert not torch.equal(lm_head, embedding)
    if target.config.tie_word_embeddings:
        assert torch.equal(lm_head, dequantise(quantise(embedding, "int8"), torch.float64))


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
    assert quantised(head).keys() == {"gate_proj", "up_proj", "down_proj", "lm_head"}


def test_no_quantization_by_default(target: CausalLM) -> None:
    before = logits(target)
    quantise_target(target, None, CPU)
    quantise_draft(target, None)
    assert torch.equal(logits(target), before)
    assert added_bytes(target, None, torch.float32, CUDA, draft=True) == 0


def test_gpu_without_fp8_is_refused(target: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(ConfigMismatch, match="take int8"):
        quantise_target(target, "fp8", CUDA)


TOKENS = torch.randint(0, 97, (21,), generator=torch.Generator().manual_seed(4))
PACKS = should_pack(torch.bfloat16, torch.device("cpu"))
needs_bf16 = pytest.mark.skipif(not PACKS, reason=skip_reason("bf16", "this CPU does not multiply it"))


def logits(model: CausalLM) -> Tensor:
    out = model(TOKENS, torch.arange(len(TOKENS)), dense, TargetStates((0, 2, 4)))
    assert out.aux_TA is not None
    return torch.cat((model.logits(out.hidden_TE), out.aux_TA), dim=-1)


def drafted(head: Eagle3Head) -> Tensor:
    generator = torch.Generator().manual_seed(6)
    aux = torch.randn(len(TOKENS), 96, generator=generator).to(head.norm.weight.dtype)
    return head.logits(head(head.fuse(aux), TOKENS, torch.arange(len(TOKENS)), dense))


@needs_bf16
@pytest.mark.parametrize("rows", [1, 2, 4, 17, 64])
def test_a_packed_matrix_multiplies_as_the_plain_one(rows: int) -> None:
    """The error of a packed matrix is within bf16 rounding, for every number of rows."""
    generator = torch.Generator().manual_seed(rows)
    plain = nn.Linear(96, 80, bias=False).bfloat16().requires_grad_(False)
    packed = OneDnnWeight(plain.weight, None)
    x = torch.randn(rows, 96, generator=generator).bfloat16()
    exact = x.double() @ plain.weight.double().T
    torch.testing.assert_close(packed.product(x).double(), exact, atol=2**-9, rtol=2**-8)


@pytest.fixture(params=["compiled", "torch"])
def compiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Return whether the compiled kernels are used; if not, as on a machine without a compiler."""
    if request.param == "torch":
        for module in (compiled_cpu, linear):
            monkeypatch.setattr(module, "library", lambda: None)
    elif library() is None:
        pytest.skip(skip_reason("native", "nothing is compiled here"))
    return bool(request.param == "compiled")


@needs_bf16
@pytest.mark.parametrize("head_dim", [8, 32])
def test_packing_bf16_costs_no_accuracy(shape: dict[str, Any], head_dim: int, compiled: bool) -> None:
    """Packed networks are as close to an fp64 run of the same bf16 weights as the plain networks are."""
    shape |= {"head_dim": head_dim}
    target = CausalLM(causal_lm_config(shape)).requires_grad_(False)
    config = eagle3_config(shape | {"num_hidden_layers": 1, "draft_vocab_size": 40}, target.config)
    head = Eagle3Head(config, target.model.embed_tokens).requires_grad_(False)
    randomise(target, 1), randomise(head, 2)
    target, head = target.bfloat16(), head.bfloat16()
    exact_target, exact_head = copy.deepcopy(target).double(), copy.deepcopy(head).double()
    pairs = [(target, logits, logits(exact_target)), (head, drafted, drafted(exact_head))]
    for model, run, exact in pairs:
        plain_error = (run(model).double() - exact).abs().mean()  # type: ignore[operator]
        fuse(model)
        assert not any(part.is_plain for part in model.modules() if isinstance(part, Linear))
        natively = any(isinstance(module, NativeBlock | NativeMidlayer) for module in model.modules())
        assert natively == (compiled and head_dim == 32)
        packed_error = (run(model).double() - exact).abs().mean()  # type: ignore[operator]
        assert packed_error < 1.5 * plain_error
        assert packed_error < 0.05 * exact.abs().mean()


@needs_bf16
def test_embeddings_stay_readable_when_a_tied_matrix_is_packed(target: CausalLM) -> None:
    target = target.bfloat16()
    before = target.model.embed_tokens(TOKENS)
    fuse(target)
    assert isinstance(target.lm_head.stored, CompiledWeight if library() else OneDnnWeight)
    assert torch.equal(target.model.embed_tokens(TOKENS), before)


def test_only_bf16_is_packed(target: CausalLM) -> None:
    fuse(target.float())
    assert target.lm_head.is_plain
