"""Loading of a draft from its folder in a draft process, with the parts of the target that it shares."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from specdecode_worker.contract import DraftConfig, Method
from specdecode_worker.engine.drafts.draft_loader import DraftLoader
from specdecode_worker.engine.drafts.own_device.draft_child import BuiltDraft
from specdecode_worker.engine.drafts.own_device.draft_server import DraftServer, ServedDrafter
from specdecode_worker.engine.step.device_state import DeviceState
from specdecode_worker.models.checkpoints.safetensors_headers import read_tensor_headers
from specdecode_worker.models.checkpoints.weights import prepare_llama
from specdecode_worker.models.networks.llama import Llama

_SHARED: dict[Method, tuple[str, ...]] = {
    "eagle3": ("model.embed_tokens.weight", "lm_head.weight"),
    "eagle": ("model.embed_tokens.weight", "lm_head.weight"),
}
"""Weights of the target that a head of this method may share; the output matrix only if it has none itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderDraft:
    """Loader of one draft in its own process; a `BuildDraft`."""

    config: DraftConfig
    """Configuration of the draft, whose ``uri`` is its local folder."""
    uri: str
    """URI of the draft for the report."""
    name: str
    target_folder: Path
    max_model_len: int
    dtype: torch.dtype
    device: torch.device
    slots: int
    """Number of requests that run at once."""
    blocks: int
    threads: int
    """Number of torch threads on a CPU."""

    def __call__(self) -> BuiltDraft:
        """Load the draft. Raise ModelError if it cannot be loaded."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        else:
            torch.set_num_threads(self.threads)
        shared = _SHARED.get(self.config.method, ())
        if self.config.uri is not None and "lm_head.weight" in read_tensor_headers(Path(self.config.uri)).tensors:
            shared = tuple(name for name in shared if name != "lm_head.weight")
        target = _shared_part(self.target_folder, shared, self.max_model_len, self.dtype, self.device)
        state = DeviceState(self.slots, self.max_model_len, self.dtype, self.device)
        load = DraftLoader(
            target=target,
            target_folder=self.target_folder,
            max_model_len=self.max_model_len,
            state=state,
            blocks=self.blocks,
            resolve=Path,
            host_is_current=True,
        )
        loaded = load(self.config, self.name)
        assert isinstance(loaded.drafter, ServedDrafter), "the contract allows no other method"
        state.allocate_states(loaded.drafter.reads.width(target.config.hidden_size))
        server = DraftServer(drafter=loaded.drafter, state=state, vocab_size=target.config.vocab_size)
        return BuiltDraft(server, loaded.state.model_copy(update={"uri": self.uri}))


def _shared_part(
    folder: Path, shared: tuple[str, ...], max_model_len: int, dtype: torch.dtype, device: torch.device
) -> Llama:
    """Return the target with the weights that a draft may share; the others stay on the meta device."""
    prepared = prepare_llama(folder, max_model_len=max_model_len)
    target, tensors = prepared.network, {}
    names = [name for name in shared if name in prepared.checkpoint]
    for name, tensor in prepared.checkpoint.read_all(names):
        tensors[name] = nn.Parameter(tensor.to(device, dtype), requires_grad=False)
    # A draft model shares nothing, but dtype and device of a draft are those of this matrix.
    nothing = nn.Parameter(torch.empty(0, dtype=dtype, device=device), requires_grad=False)
    target.model.embed_tokens.weight = tensors.get("model.embed_tokens.weight", nothing)
    target.lm_head.weight = tensors.get("lm_head.weight", target.model.embed_tokens.weight)
    return target
