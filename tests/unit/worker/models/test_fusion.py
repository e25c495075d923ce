"""Tests that fusion and packing do not change the function that a network computes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from specdecode_kernels.cpu.native import library
from specdecode_worker.models import compiled_cpu, linear
from specdecode_worker.models.arch import causal_lm_config
from specdecode_worker.models.causal_lm import CausalLM
from specdecode_worker.models.compiled_cpu import NativeBlock, NativeMidlayer
from specdecode_worker.models.config import eagle3_config
from specdecode_worker.models.eagle import Eagle3Head
from specdecode_worker.models.linear import CompiledWeight, Linear, OneDnnWeight
from specdecode_worker.models.optimize import fuse, should_pack
from specdecode_worker.models.target_states import TargetStates
from support.tiers import skip_reason
from support.worker.dense_attention import dense
from support.worker.small_folders import randomise

TOKENS = torch.randint(0, 97, (21,), generator=torch.Generator().manual_seed(4))
PACKS = should_pack(torch.bfloat16, torch.device("cpu"))
needs_bf16 = pytest.mark.skipif(not PACKS, reason=skip_reason("bf16", "this CPU does not multiply it"))


@pytest.fixture(params=[False, True], ids=["untied", "tied"])
def target(request: pytest.FixtureRequest, shape: dict[str, Any]) -> CausalLM:
    model = CausalLM(causal_lm_config(shape | {"tie_word_embeddings": request.param})).requires_grad_(False)
    randomise(model, 1)
    return model


def logits(model: CausalLM, dense: Any) -> Tensor:
    out = model(TOKENS, torch.arange(len(TOKENS)), dense, TargetStates((0, 2, 4)))
    assert out.aux_TA is not None
    return torch.cat((model.logits(out.hidden_TE), out.aux_TA), dim=-1)


def drafted(head: Eagle3Head, dense: Any) -> Tensor:
    generator = torch.Generator().manual_seed(6)
    aux = torch.randn(len(TOKENS), 96, generator=generator).to(head.norm.weight.dtype)
    return head.logits(head(head.fuse(aux), TOKENS, torch.arange(len(TOKENS)), dense))


@pytest.fixture
def head(target: CausalLM, shape: dict[str, Any]) -> Eagle3Head:
    config = eagle3_config(shape | {"num_hidden_layers": 1, "draft_vocab_size": 40}, target.config)
    eagle3_head = Eagle3Head(config, target.model.embed_tokens).requires_grad_(False)
    randomise(eagle3_head, 2)
    return eagle3_head


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
    pairs = [(target, logits, logits(exact_target, dense)), (head, drafted, drafted(exact_head, dense))]
    for model, run, exact in pairs:
        plain_error = (run(model, dense).double() - exact).abs().mean()  # type: ignore[operator]
        fuse(model)
        assert not any(part.is_plain for part in model.modules() if isinstance(part, Linear))
        natively = any(isinstance(module, NativeBlock | NativeMidlayer) for module in model.modules())
        assert natively == (compiled and head_dim == 32)
        packed_error = (run(model, dense).double() - exact).abs().mean()  # type: ignore[operator]
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
    fuse(target)
    assert target.lm_head.is_plain
