"""Quantised weights keep speculation lossless, for a quantised draft and for a quantised target.

The tests run in float64, with weights in the format in which a GPU would store them.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch

from specdecode_kernels.rope_cache.reference import Scales
from specdecode_worker.contract import TreeShape
from specdecode_worker.models.linear import QuantizedWeight
from specdecode_worker.models.optimize import fuse, quantise_draft, quantise_target
from support.lossless.small_requests import plan_of, submit
from support.small_llama import texts
from support.tiers import covering

SHAPES = ("chain:4", "tree:3,2,1,1")
TOKENS = 40
CPU = torch.device("cpu")


TARGETS = {"plain target": None, "int8 target": "int8", "fp8 target": "fp8"}


@pytest.fixture(params=TARGETS.values(), ids=TARGETS)
def pair(request: pytest.FixtureRequest, pair: Any) -> Any:
    """Return a pair with an optionally quantised target and int4 drafts.

    The noised copy was made from the unquantised target.
    """
    quantised = replace(
        pair,
        target=copy.deepcopy(pair.target),
        copy=copy.deepcopy(pair.copy),
        eagle=copy.deepcopy(pair.eagle),
        peagle=copy.deepcopy(pair.peagle),
        dflash=copy.deepcopy(pair.dflash, {id(pair.target): pair.target}),
    )
    quantise_target(quantised.target, request.param, CPU, stored=True)
    fuse(quantised.target)
    assert any(isinstance(one, QuantizedWeight) for one in quantised.target.modules()) == (request.param is not None)
    for draft in (quantised.copy.llama, quantised.eagle, quantised.peagle, quantised.dflash):
        quantise_draft(draft, "int4", stored=True)
        fuse(draft)
        assert any(isinstance(module, QuantizedWeight) for module in draft.modules())
    return quantised


@pytest.mark.parametrize(
    ("pair", "draft", "shape", "sampled"),
    covering([*TARGETS.values()], ["copy", "eagle3", "peagle", "dflash"], SHAPES, [False, True]),
    indirect=["pair"],
)
def test_text_equals_plain_decoding(make_engine: Any, plain: Any, draft: str, shape: str, sampled: bool) -> None:
    engine = make_engine(draft, max_num_seqs=5, plan=plan_of([TreeShape.parse(shape)]))
    requests = [submit(i, sampled=sampled, tokens=TOKENS) for i in range(8)]
    assert texts(engine, requests) == plain(requests)
    assert engine.report().accepted_tokens > 0


SCALES = tuple(Scales(0.004 * 2**layer, 0.01) for layer in range(8))


@pytest.mark.parametrize(
    ("options", "shape", "sampled"),
    covering([{}, {"blocks": 12}, {"budget": 40}, {"graphs": (1, 2, 4)}], SHAPES, [False, True]),
    ids=str,
)
@pytest.mark.parametrize("pair", [None], ids=["plain target"], indirect=True)
def test_text_on_a_cache_in_fp8(
    make_engine: Any, plain: Any, pair: Any, options: dict[str, Any], shape: str, sampled: bool
) -> None:
    """Keys and values of the own pass are read as rounded as all others, in chunks, after preemption, and in graphs."""
    scales = SCALES[: pair.config.num_hidden_layers]
    engine = make_engine("copy", max_num_seqs=5, scales=scales, **options, plan=plan_of([TreeShape.parse(shape)]))
    requests = [submit(i, sampled=sampled, tokens=TOKENS) for i in range(6)]
    wanted = texts(make_engine(None, scales=scales), requests)
    assert texts(engine, requests) == wanted
    assert wanted != plain(requests), "rounding must change the text to be seen"
    assert engine.report().accepted_tokens > 0
