"""Drafts of the small random model in draft processes, which all engines of a test session share."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import torch

from specdecode_worker.contract import DraftState
from specdecode_worker.core.device_state import DeviceState
from specdecode_worker.drafts.draft_model import ModelDrafter
from specdecode_worker.drafts.eagle import EagleDrafter
from specdecode_worker.drafts.own_device import DraftProcess, OwnDrafter, ProcessSupervisor, drafter_of, message_regions
from specdecode_worker.drafts.own_device_process import DraftReady, DraftServer
from specdecode_worker.drafts.registry import paged_cache
from specdecode_worker.models.causal_lm import CausalLM
from specdecode_worker.models.eagle import Eagle3Head

CPU = torch.device("cpu")
SLOTS, LENGTH, BLOCKS = 48, 256, 1000
"""Sizes of a draft process: at least those of every engine of the tests."""


@dataclass(frozen=True)
class NetworkDraft:
    """Loader of a draft that is a network of the test's process; a `BuildDraft`."""

    network: Eagle3Head | CausalLM
    vocab_size: int

    def __call__(self) -> DraftServer:
        torch.set_num_threads(1)
        state = DeviceState(SLOTS, LENGTH, torch.float64, CPU)
        config = self.network.config
        cache = paged_cache(config, config.num_hidden_layers, BLOCKS, torch.float64, CPU)
        drafter: EagleDrafter | ModelDrafter
        if isinstance(self.network, CausalLM):
            drafter = ModelDrafter(self.network, self.vocab_size, cache, state)
        else:
            drafter = EagleDrafter(self.network, self.network.target_ids, cache, state, 512)
            state.allocate_states(drafter.reads.width(config.target_hidden_size))
        loaded = DraftState(method="draft-model", hash="d")
        return DraftServer(drafter=drafter, loaded=loaded, state=state, vocab_size=self.vocab_size)


@dataclass
class OwnDrafts:
    """Draft processes by the name of their draft. Each one starts when the first engine asks for it."""

    running: dict[str, tuple[ProcessSupervisor, DraftReady]] = field(default_factory=dict)

    def drafter(self, name: str, network: Eagle3Head | CausalLM, vocab_size: int, state: DeviceState) -> OwnDrafter:
        if name not in self.running or not self.running[name][0].usable:
            self.running[name] = self._start(network, vocab_size)
        supervisor, ready = self.running[name]
        return drafter_of(ready, supervisor, state)

    def close(self) -> None:
        for supervisor, _ in self.running.values():
            supervisor.close()

    def _start(self, network: Eagle3Head | CausalLM, vocab_size: int) -> tuple[ProcessSupervisor, DraftReady]:
        regions = message_regions(DeviceState(SLOTS, LENGTH, torch.float64, CPU), 1024, 4 * 32)
        start = partial(DraftProcess, NetworkDraft(network, vocab_size), *regions, 60.0)
        process = start()
        ready = process.wait_ready()
        return ProcessSupervisor(process, start, first_delay=0.05), ready
