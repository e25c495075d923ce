"""Placement of tensors on a GPU, checked without one: fake tensors have a device, and refuse to meet another one."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import cast, get_args

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from specdecode_kernels import dispatch
from specdecode_worker.__main__ import main
from specdecode_worker.models.causal_lm import CausalLM
from specdecode_worker.models.drafts import WeightMethod
from specdecode_worker.training import recipe
from specdecode_worker.training.artifacts import Ancestor
from specdecode_worker.training.conversations import Conversation
from specdecode_worker.training.recipe import DraftSettings
from specdecode_worker.training.trainer import TrainSettings, overlap, soft_cross_entropy
from specdecode_worker.training.unroll import (
    TrainingBatch,
    device_of_draft,
    logits_of,
    make_batch,
    unrolled,
    vocabulary_of,
)
from support.tiers import skip_reason
from support.training_fixtures import KNOWN, MAKERS, small_target

CUDA = torch.device("cuda")
DEPTH = 3


@pytest.fixture
def fake() -> FakeTensorMode:
    """Return a mode whose tensors have a device and a shape and no content. Gradients need a real device."""
    return FakeTensorMode(shape_env=ShapeEnv())


def move(network: nn.Module) -> None:
    """Replace the weights of a network by fake ones on a GPU. Call it in the mode."""
    for module in network.modules():
        for name, parameter in module.named_parameters(recurse=False):
            empty = torch.empty(parameter.shape, dtype=parameter.dtype, device=CUDA)
            setattr(module, name, nn.Parameter(empty, requires_grad=False))
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.empty(buffer.shape, dtype=buffer.dtype, device=CUDA))


def on_gpu(batch: TrainingBatch) -> TrainingBatch:
    """Return a fake batch of the same shapes on a GPU. Call it in the mode."""
    moved = {}
    for field in fields(batch):
        tensor = getattr(batch, field.name)
        moved[field.name] = None if tensor is None else torch.empty(tensor.shape, dtype=tensor.dtype, device=CUDA)
    return TrainingBatch(**moved)


@pytest.mark.parametrize(
    ("method", "split"),
    [*((method, False) for method in MAKERS), *((method, True) for method in get_args(WeightMethod))],
)
def test_drafts_unroll_on_the_device_of_their_weights(
    method: str,
    split: bool,
    target: CausalLM,
    conversations: list[Conversation],
    fake: FakeTensorMode,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The draft of a split target starts from a copy in host memory, of which it reads layers alone."""
    batch = make_batch(conversations[:3], torch.float32, final=method in ("eagle", "medusa"))
    draft = MAKERS[method](target, DEPTH)
    if split:
        (tmp_path / "vocabulary.json").write_text(json.dumps(KNOWN.tolist()))
        described = DraftSettings(target=Ancestor("", tmp_path, ""), method=cast(WeightMethod, method))
        draft = recipe._draft(target, small_target(), described, tmp_path, TrainSettings(depth=DEPTH))
    monkeypatch.setattr(dispatch, "on_gpu", lambda x: False)  # Triton's kernels need content
    with fake:
        move(target)
        move(draft)
        assert device_of_draft(draft).type == "cuda"
        assert vocabulary_of(draft, 64).device.type == "cuda"
        for k, (state_BAE, rooted_BA) in enumerate(unrolled(draft, on_gpu(batch), DEPTH)):
            assert {state_BAE.device.type, rooted_BA.device.type} == {"cuda"}
            assert logits_of(draft, state_BAE.flatten(0, 1), k).device.type == "cuda"


def test_losses_are_computed_on_the_device_of_the_logits(fake: FakeTensorMode) -> None:
    with fake:
        logits_RV = torch.zeros(300, 64, device=CUDA, requires_grad=True)
        target_RV = torch.zeros(300, 64, device=CUDA)
        loss = soft_cross_entropy(logits_RV, target_RV, torch.ones(300, device=CUDA))
        loss = loss + overlap(logits_RV, target_RV, 1.0).sum()
        assert loss.device.type == "cuda"


@pytest.mark.skipif(torch.cuda.is_available(), reason=skip_reason("no GPU", "it looks for the message without one"))
@pytest.mark.parametrize("command", [["train"], ["distill", "--capture", "x", "--golden", "x", "--replay-share", "0"]])
def test_missing_gpu_is_reported(command: list[str], tmp_path: object, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, "--out", str(tmp_path), "--device", "cuda"]) == 1
    assert "GPU" in capsys.readouterr().err
