"""Speculative text of Llama 4 equals transformers' greedy text, over boundaries of attention chunks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specdecode_worker.core.messages import Submit
from specdecode_worker.engine.cuda_graphs import EagerBackend
from specdecode_worker.engine.engine import Engine
from specdecode_worker.models.config import eagle3_config
from specdecode_worker.models.eagle import Eagle3Head
from specdecode_worker.models.linear import QuantizedWeight
from specdecode_worker.models.optimize import fuse
from specdecode_worker.models.weights import load_causal_lm
from specdecode_worker.sampling.params import Sampling
from support.small_llama import Networks, NoisedCopy, engine_of, plan_of, texts
from support.small_llama4 import dense_chunks, save_llama4, write_quantized_llama4
from support.tiers import covering
from support.worker.quantized_folders import Rounding, int4, pack_quantized, scaled

TOKENS = 30
SHAPES = ("none", "chain:5", "0,0,0,1,1,2,4,7")


def made_request(index: int, length: int) -> Submit:
    prompt = torch.randint(3, 61, (length,), generator=torch.Generator().manual_seed(index)).tolist()
    sampling = Sampling(max_tokens=TOKENS, seed=index, temperature=0.0)
    return Submit(request_id=str(index), prompt=tuple(prompt), sampling=sampling)


REQUESTS = [made_request(index, length) for index, length in enumerate((3, 14, 31, 50))]
Made = tuple[Networks, dict[str, list[int]]]
"""A target with its draft, and the greedy texts of the requests."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Return a target with its draft, and transformers' texts."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("llama4")
    theirs = save_llama4(folder, torch.float64, num_hidden_layers=4, vocab_size=61)
    target = load_causal_lm(folder, dtype=torch.float64, device=torch.device("cpu"))
    head = NoisedCopy(target)
    for network in (target, head):
        fuse(network)
    passed = partial(theirs, use_cache=False)
    wanted = {one.request_id: greedy(lambda tokens: passed(tokens[None]).logits[0], one.prompt) for one in REQUESTS}
    return Networks(target, head), wanted


COPIES: dict[str, Rounding] = {"fp8": scaled("rows"), "int4": int4(partial(pack_quantized, symmetric=False), group=32)}


@pytest.fixture(scope="module", params=COPIES)
def copied(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Return a target with experts as compressed-tensors stores them, and the texts of its dequantized weights."""
    torch.set_num_threads(1)
    folder: Path = tmp_path_factory.mktemp("copy")
    write_quantized_llama4(folder, COPIES[request.param], num_hidden_layers=4, vocab_size=61)
    plain, stored = (
        load_causal_lm(folder, dtype=torch.float64, device=torch.device("cpu"), stored=stored)
        for stored in (False, True)
    )
    attend = dense_chunks(plain.config)
    wanted = {
        one.request_id: greedy(
            lambda tokens: plain.logits(plain(tokens, torch.arange(len(tokens)), attend).hidden_TE), one.prompt
        )
        for one in REQUESTS
    }
    assert len({tuple(text[-8:]) for text in wanted.values()}) > 1, "texts must differ to mean something"
    head = NoisedCopy(plain)
    for network in (stored, head):
        fuse(network)
    assert any(isinstance(one, QuantizedWeight) for one in stored.model.layers[1].mlp.modules())
    return Networks(stored, head), wanted


@torch.inference_mode()
def greedy(logits: Callable[[Tensor], Tensor], prompt: Sequence[int]) -> list[int]:
    """Return the text of a model without a cache: transformers' drops keys of chunked layers."""
    tokens = list(prompt)
    for _ in range(TOKENS):
        tokens.append(int(logits(torch.tensor(tokens))[-1].argmax()))
    return tokens[len(prompt) :]


def engine_with(pair: Networks, shape: str, **options: Any) -> Engine:
    engine = engine_of(pair, **options)
    engine.set_plan(plan_of(shape))
    return engine


OPTIONS: dict[str, dict[str, Any]] = {
    "usual": {},
    "odd chunks": {"budget": 7},
    "pipelined": {"budget": 23, "pipelined": True},
    "whole prompts": {"chunked": False},
    "few blocks": {"blocks": 14},
    "one at a time": {"max_num_seqs": 1},
    "captured": {"backend": EagerBackend()},
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("options", OPTIONS)
def test_text_is_that_of_transformers(made: Made, shape: str, options: str) -> None:
    pair, wanted = made
    engine = engine_with(pair, shape, **OPTIONS[options])
    assert texts(engine, REQUESTS) == wanted
    if options == "few blocks" and shape == "none":
        assert engine.report().preemptions > 0
    if engine._graphs is not None:
        assert engine._graphs.replayed > sum(engine._graphs.eager.values())


@pytest.mark.parametrize(
    ("copied", "shape", "options"),
    covering([*COPIES], SHAPES, [{}, {"budget": 23}, {"backend": EagerBackend()}]),
    indirect=["copied"],
)
def test_quantized_copies(copied: Made, shape: str, options: dict[str, Any]) -> None:
    pair, wanted = copied
    engine = engine_with(pair, shape, **options)
    assert texts(engine, REQUESTS) == wanted
    assert shape == "none" or engine.report().accepted_tokens > 0


@pytest.mark.parametrize("shape", SHAPES)
def test_reused_prefixes(made: Made, shape: str) -> None:
    """The second run finds the blocks of the first, and starts in the middle of a chunk's blocks."""
    pair, wanted = made
    engine = engine_with(pair, shape)
    for _ in range(2):
        assert texts(engine, REQUESTS) == wanted
    assert engine.report().prefix_hit_tokens > 0


@pytest.mark.parametrize("shape", SHAPES[1:])
def test_random_eagle3_head(made: Made, shape: str) -> None:
    """A head of Llama 3's form attends to the whole text; its states are those of three layers of the target."""
    pair, wanted = made
    fields = {"hidden_size": 64, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = eagle3_config(fields | {"head_dim": 16, "draft_vocab_size": 61}, pair.target.config)
    head = Eagle3Head(config, pair.target.model.embed_tokens).double().requires_grad_(False)
    assert texts(engine_with(Networks(pair.target, head), shape), REQUESTS) == wanted
