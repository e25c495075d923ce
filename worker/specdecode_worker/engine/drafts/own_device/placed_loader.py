"""Loader of drafts by their placement: on the device of the target, or in a draft process on a device of its own."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from functools import partial

import torch

from specdecode_worker.contract import MAX_NODES, DraftConfig, DraftState
from specdecode_worker.engine.drafts.draft_loader import DraftLoader
from specdecode_worker.engine.drafts.draft_model import LONGEST_CATCH_UP
from specdecode_worker.engine.drafts.loaded_draft import DEFAULT_DRAFT, LoadDraft, LoadedDraft
from specdecode_worker.engine.drafts.own_device.draft_child import BuildDraft
from specdecode_worker.engine.drafts.own_device.draft_messages import Ready
from specdecode_worker.engine.drafts.own_device.draft_process import DraftProcess, Regions
from specdecode_worker.engine.drafts.own_device.folder_draft import FolderDraft
from specdecode_worker.engine.drafts.own_device.own_drafter import OwnModelDrafter, OwnStateDrafter
from specdecode_worker.engine.drafts.own_device.process_supervisor import FIRST_DELAY_SECONDS, ProcessSupervisor
from specdecode_worker.engine.drafts.own_device.tensor_region import TensorRegion
from specdecode_worker.engine.step.device_state import STATE_RING_POSITIONS, DeviceState
from specdecode_worker.models.configs.target_states import TargetStates
from specdecode_worker.models.errors import ModelError

_SPARE_BYTES = 1 << 16
"""Bytes of a region for the small tensors of a message and the alignment of all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnDevice:
    """Device of the drafts that run in processes of their own, and bounds of their messages."""

    device: torch.device
    threads: int
    """Number of torch threads of a draft process on a CPU."""
    max_num_batched_tokens: int
    reply_seconds: float
    """Time without an answer after which a draft process counts as hung."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedDraftLoader:
    """``LoadDraft`` for drafts of either placement."""

    shared: LoadDraft
    """Loader of drafts on the device of the target."""
    local: DraftLoader
    """Loader that knows the target, its folder and the size of the caches."""
    own: OwnDevice

    def __call__(self, config: DraftConfig, name: str = DEFAULT_DRAFT) -> LoadedDraft:
        """Load a draft. Raise ModelError if it cannot be loaded or if its device is missing."""
        if config.placement == "shared":
            return self.shared(config, name)
        assert config.uri is not None, "the contract allows no other method"
        seen = torch.cuda.device_count()
        if self.own.device.type == "cuda" and seen <= (self.own.device.index or 0):
            raise ModelError(
                f"draft.placement own needs a GPU beside the target's, and torch sees {seen} here; "
                "request one more, or set placement shared"
            )
        build = FolderDraft(
            config=config.model_copy(update={"placement": "shared", "uri": str(self.local.resolve(config.uri))}),
            uri=config.uri,
            name=name,
            target_folder=self.local.target_folder,
            max_model_len=self.local.max_model_len,
            dtype=self.local.state.dtype,
            device=self.own.device,
            slots=self.local.state.padding_slot,
            blocks=self.local.blocks,
            threads=self.own.threads,
        )
        widest = self.local.target.config.hidden_size * (self.local.target.config.num_hidden_layers + 2)
        return start_draft(build, self.local.state, self.own.max_num_batched_tokens, widest, self.own.reply_seconds)

    def leaves_memory_of_target(self, config: DraftConfig) -> bool:
        """Return whether a draft takes no memory of the target's device."""
        return config.placement == "own" and self.own.device != self.local.state.length_S.device


def start_draft(
    build: BuildDraft,
    state: DeviceState,
    max_tokens: int,
    widest: int,
    reply_seconds: float,
    first_delay: float = FIRST_DELAY_SECONDS,
) -> LoadedDraft:
    """Start a draft process and wait until its draft is loaded.

    Args:
        build: Loader of the draft, which runs in the process.
        state: Device state of the running requests.
        max_tokens: Most tokens of prompts in one step.
        widest: Largest width of the target states that a draft could read.
        reply_seconds: Time without an answer after which the process counts as hung.
        first_delay: Time from the loss of the process to its restart, in seconds.

    Raises:
        ModelError: The draft cannot be loaded.
    """
    regions = message_regions(state, max_tokens, widest)
    start = partial(DraftProcess, build, regions, reply_seconds)
    process = start()
    try:
        ready = process.wait_ready()
    except BaseException:
        process.kill()
        raise
    drafter = drafter_of(ready, state)
    supervisor = ProcessSupervisor(process, start, first_delay)
    drafter.connect(supervisor)
    # A draft is replaced, or loaded and never used, without further notice.
    weakref.finalize(drafter, supervisor.close)
    return LoadedDraft(drafter, DraftState.model_validate_json(ready.state_json))


def drafter_of(ready: Ready, state: DeviceState) -> OwnStateDrafter | OwnModelDrafter:
    """Return a drafter for the draft of a process, to be connected with its supervisor."""
    reads = TargetStates(ready.layers, ready.final)
    return OwnStateDrafter(reads, ready.last_position, state) if reads else OwnModelDrafter(ready.last_position, state)


def message_regions(state: DeviceState, max_tokens: int, widest: int) -> Regions:
    """Return regions for the largest messages. Memory that is never written is never taken."""
    slots, positions = state.tokens_SP.shape
    tokens = max(positions + max_tokens, slots * max(STATE_RING_POSITIONS, LONGEST_CATCH_UP))
    texts, states = 8 * (slots * positions + tokens), (tokens + slots) * widest * state.dtype.itemsize
    ranked = 8 * slots * (MAX_NODES + 1) * 8
    return Regions(TensorRegion(texts + states + _SPARE_BYTES), TensorRegion(ranked + _SPARE_BYTES))
