"""Target of a training run that two ranks share: the same states and drafts as on one device."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from specdecode_worker.models.causal_lm import CausalLM
from specdecode_worker.models.errors import ConfigMismatch
from specdecode_worker.models.optimize import quantise_target
from specdecode_worker.models.target_states import TargetStates
from specdecode_worker.models.weights import load_causal_lm
from specdecode_worker.training.evaluation import ZeroContextAttention
from specdecode_worker.training.rollout import read_states
from specdecode_worker.training.split_target import TargetPlacement, placed_target
from support import small_model

CPU = torch.device("cpu")
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


@pytest.fixture(scope="module", params=["tied", "untied"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    small_model.write_target(path, config={"tie_word_embeddings": request.param == "tied"})
    if request.param == "untied":
        weights = load_file(path / "model.safetensors")
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].flip(0).contiguous()
        save_file(weights, path / "model.safetensors")
    return path


@pytest.fixture(scope="module")
def whole(folder: Path) -> CausalLM:
    return load_causal_lm(folder, dtype=torch.float32, device=CPU)


@pytest.fixture
def split(folder: Path) -> Iterator[CausalLM]:
    """Return the target in two parts; a process can be in one process group only, so no test shares it."""
    with placed_target(TargetPlacement(folder=folder, dtype="float32", device=CPU, size=2, threads=1)) as target:
        yield target


@torch.inference_mode()
def test_states_and_logits_are_those_of_one_device(whole: CausalLM, split: CausalLM) -> None:
    assert split.config.num_attention_heads == whole.config.num_attention_heads // 2
    for length in (3, 40):
        tokens_N = torch.randint(0, 250, (length,), generator=torch.Generator().manual_seed(length))
        expected, split_states = read_states(whole, tokens_N), read_states(split, tokens_N)
        for one, other in zip(expected, split_states, strict=True):
            torch.testing.assert_close(other, one, **CLOSE)
        torch.testing.assert_close(split.logits(split_states[1]), whole.logits(expected[1]), **CLOSE)


@torch.inference_mode()
def test_pass_behind_a_context_is_that_of_one_device(whole: CausalLM, split: CausalLM) -> None:
    tokens = torch.ones(4, dtype=torch.int64)
    outs = [
        target(tokens, torch.arange(100, 104), ZeroContextAttention(), TargetStates((), True))
        for target in (whole, split)
    ]
    torch.testing.assert_close(outs[1].hidden_TE, outs[0].hidden_TE, **CLOSE)


@pytest.mark.parametrize("size", [1, 2])
def test_the_target_is_rounded_as_workers_round_it(folder: Path, whole: CausalLM, size: int) -> None:
    """Distillation learns from the target that is served. Several devices round parts of rows, as workers do."""
    served = load_causal_lm(folder, dtype=torch.float32, device=CPU)
    quantise_target(served, "fp8", CPU)
    placement = TargetPlacement(folder=folder, dtype="float32", device=CPU, size=size, threads=1, quantization="fp8")
    tokens_N = torch.arange(20)
    with torch.inference_mode(), placed_target(placement) as target:
        states = read_states(target, tokens_N)[1]
        assert target.form == "fp8, rounded at load"
    if size == 1:
        torch.testing.assert_close(states, read_states(served, tokens_N)[1], **CLOSE)
    assert not torch.allclose(states, read_states(whole, tokens_N)[1], **CLOSE)


def test_number_of_devices_that_does_not_divide_the_heads_is_refused(folder: Path) -> None:
    placement = TargetPlacement(folder=folder, dtype="float32", device=CPU, size=3)
    with pytest.raises(ConfigMismatch, match="cannot be split"), placed_target(placement):
        pass


def test_the_other_ranks_end_before_the_first_leaves_their_group(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL waits for the ranks of a machine that are still in the group."""
    placement = TargetPlacement(folder=folder, dtype="float32", device=CPU, size=2, threads=1)
    destroy, running = dist.destroy_process_group, [""]

    def destroyed() -> None:
        running[:] = [one.name for one in multiprocessing.active_children() if one.name.startswith("target-rank")]
        destroy()

    monkeypatch.setattr(dist, "destroy_process_group", destroyed)
    with placed_target(placement):
        pass
    assert (running, dist.is_initialized()) == ([], False)


def test_lost_rank_ends_the_process(folder: Path) -> None:
    """A collective without a rank may never return, so a Job's pod has to end and to start again."""
    code = (
        "import multiprocessing, torch, time\n"
        "from pathlib import Path\n"
        "from specdecode_worker.training.split_target import TargetPlacement, placed_target\n"
        "if __name__ == '__main__':\n"
        f"    placement = TargetPlacement(folder=Path({str(folder)!r}), dtype='float32', device=torch.device('cpu'), "
        "size=2, threads=1)\n"
        "    with placed_target(placement):\n"
        "        multiprocessing.active_children()[0].kill()\n"
        "        time.sleep(60)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, "a rank of the target ended" in ended.stderr) == (1, True), ended.stderr
