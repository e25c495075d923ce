"""Fixtures for the training tests: a small random Llama, a head for it, and conversations recorded from it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest
import torch

# The first optimizer imports it, which takes seconds that no test's time may contain.
import torch._dynamo
from torch import Tensor, nn

from specdecode_worker.models.arch import causal_lm_config
from specdecode_worker.models.causal_lm import CausalLM
from specdecode_worker.models.drafts import Draft
from specdecode_worker.models.eagle import Eagle3Head
from specdecode_worker.training.conversations import Conversation
from specdecode_worker.training.heads import new_dflash, new_draft_model, new_eagle, new_head, new_medusa, new_peagle
from specdecode_worker.training.rollout import read_states
from specdecode_worker.training.split_target import TargetPlacement
from support.worker.dense_attention import dense
from support.worker.small_folders import SHAPE, write

VOCABULARY = 64
KNOWN = torch.arange(0, VOCABULARY, 2)
"""Tokens of a draft with a vocabulary of its own: every other one."""
MAKERS: dict[str, Callable[[CausalLM, int], Draft]] = {
    "eagle3": lambda target, depth: new_head(target, KNOWN),
    "two layers": lambda target, depth: new_head(target, KNOWN, layers=2),
    "peagle": lambda target, depth: new_peagle(target, KNOWN, layers=2),
    "dflash": lambda target, depth: new_dflash(target, 2, depth),
    "eagle": lambda target, depth: new_eagle(target, layers=2),
    "medusa": lambda target, depth: new_medusa(target, KNOWN, heads=depth),
    "draft-model": lambda target, depth: new_draft_model(target, layers=3),
}
"""Makers of new drafts of each method for a target, up to a depth."""


class Letters:
    """Chat with one token per letter."""

    def ask(self, messages: list[dict[str, str]]) -> list[int]:
        return [ord(letter) for letter in messages[-1]["content"]]

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]


CONFIG = SHAPE | {
    "vocab_size": VOCABULARY,
    "num_hidden_layers": 8,  # with fewer layers, two of the three aux layers would coincide
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "eos_token_id": 0,
}


def small_target() -> CausalLM:
    """Return a random Llama of eight layers."""
    torch.manual_seed(0)
    return CausalLM(causal_lm_config(CONFIG)).requires_grad_(False)


@pytest.fixture
def target() -> CausalLM:
    return small_target()


@pytest.fixture
def placement(target: CausalLM, tmp_path: Path) -> TargetPlacement:
    """Return the placement of the target on one device, from a folder without a tokenizer."""
    folder = write(tmp_path / "target", CONFIG, target)
    return TargetPlacement(folder=folder, dtype="float32", device=torch.device("cpu"), threads=1)


Module = TypeVar("Module", bound=nn.Module)


def shaken(draft: Module) -> Module:
    """Add noise to the weights of a new draft, so that no half of a matrix is zero, and return it."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return draft


@pytest.fixture
def head(target: CausalLM) -> Eagle3Head:
    """Return a head with every other token in its vocabulary."""
    return shaken(new_head(target, KNOWN))


@pytest.fixture
def conversations(target: CausalLM) -> list[Conversation]:
    """Return six random conversations of two domains with the target's states, half of them greedy."""
    generator = torch.Generator().manual_seed(2)
    samples = []
    for i, length in enumerate((17, 23, 9, 30, 12, 26)):
        tokens = torch.randint(1, VOCABULARY, (length,), generator=generator)
        aux, hidden = read_states(target, tokens)
        temperature = 0.0 if i % 2 == 0 else 0.8
        samples.append(Conversation(tokens.int(), aux, hidden, 3 + i % 3, temperature, "code" if i < 3 else "prose"))
    return samples


class Growing:
    """Dense attention of several layers: every query attends to all keys that its layer has received, in order."""

    def __init__(self) -> None:
        self.stored: dict[int, tuple[Tensor, ...]] = {}

    def __call__(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        before = self.stored.get(layer, (k_TKD[:0], v_TKD[:0]))
        k, v = self.stored[layer] = tuple(map(torch.cat, zip(before, (k_TKD, v_TKD), strict=True)))
        q = torch.cat((q_THD.new_zeros(len(k) - len(q_THD), *q_THD.shape[1:]), q_THD))
        return dense(layer, q, k, v)[-len(q_THD) :]
