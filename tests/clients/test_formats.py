"""Targets that compressed-tensors writes, and packings of others that it reads (`make proofs P=formats`).

GPTQModel has no wheel, and transformers reads FBGEMM on a GPU only. Those formats are packed by our own tests after
their sources (tests/unit/worker/models/test_formats.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from specdecode_worker.models import collectives
from specdecode_worker.models.linear import Shard
from specdecode_worker.models.optimize import fuse
from specdecode_worker.models.tensor_parallel import load_shard
from specdecode_worker.models.weights import load_causal_lm
from support.clients import ClientRunner
from support.worker.dense_attention import dense
from support.worker.quantized_folders import awq, int4, scaled, write_quantized
from support.worker.thread_ranks import ThreadRanks

pytestmark = [pytest.mark.proof("formats"), pytest.mark.timeout(900)]

CPU = torch.device("cpu")
PROGRAM = Path(__file__).parent / "programs/write_formats.py"
NAMES = (
    "int4-128",
    "int4-32",
    "int4-rows",
    "int4-asymmetric",
    "int8-packed",
    "fp8-rows",
    "fp8-tensor",
    "fp8-blocks",
    "int8-rows",
    "nvfp4",
    "awq",
    "inverse",
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a target in each format, its weights and its logits."""
    out = tmp_path_factory.mktemp("formats")
    write_quantized(out / "awq", int4(awq, symmetric=False), {"quant_method": "awq"})
    write_quantized(out / "inverse", scaled("blocks", name="weight_scale_inv"), {"quant_method": "fp8"})
    ClientRunner(out).run("formats", "python", str(PROGRAM), str(out))
    return out


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_the_librarys(name: str, folders: Path) -> None:
    ours = load_causal_lm(folders / name, dtype=torch.float32, device=CPU).state_dict()
    wanted = load_file(folders / name / "weights.safetensors.of")
    assert ours.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(ours[name], wanted[name])] == []


@torch.inference_mode()
@pytest.mark.parametrize("stored", [False, True], ids=["dequantized", "stored"])
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_transformers(name: str, size: int, stored: bool, folders: Path, monkeypatch: Any) -> None:
    ranks = ThreadRanks(size)
    monkeypatch.setattr(collectives, "dist", ranks)
    tokens_T = torch.arange(9) * 7 % 97

    def work(rank: int) -> torch.Tensor:
        shard = Shard(rank, size)
        model = load_shard(folders / name, shard, dtype=torch.float32, device=CPU, stored=stored)
        fuse(model)
        return model.logits(model(tokens_T, torch.arange(9), dense).hidden_TE)

    wanted = load_file(folders / name / "logits.of")["logits"]
    torch.testing.assert_close(ranks.run(work)[0], wanted, atol=1e-5, rtol=1e-5)
