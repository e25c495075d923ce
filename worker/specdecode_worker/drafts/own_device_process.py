"""The process of a draft on a device of its own: it holds weights and KV cache, and answers one message per step."""

from __future__ import annotations

import mmap
import os
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from specdecode_kernels.transfer import to_device
from specdecode_worker.contract import DraftConfig, DraftState, Method
from specdecode_worker.core.device_state import STATE_RING_POSITIONS, DeviceState
from specdecode_worker.core.messages import Submit
from specdecode_worker.core.request import DraftProgress, Request, Row
from specdecode_worker.drafts.base import CapturedDrafter, catch_up_runs, draft_trees
from specdecode_worker.drafts.registry import DraftLoader
from specdecode_worker.drafts.swap import describe_failure
from specdecode_worker.models.causal_lm import CausalLM
from specdecode_worker.models.headers import read_tensor_headers
from specdecode_worker.models.target_states import TargetStates
from specdecode_worker.models.weights import prepare_causal_lm
from specdecode_worker.sampling.params import FinishRule, SamplingParams
from specdecode_worker.sampling.sampler import BatchTokens, sampler_of
from specdecode_worker.sampling.trees import Tree, forest_of

# Memory that the worker and a draft process share, for the tensors of one message at a time.
#
# The memory belongs to no file system, so the size limit of /dev/shm does not apply, and pages that were never written
# take no memory. It is host memory on every device: a draft process that is killed can then not break the device of the
# target, as it could if the target's process read memory of the other one's device.

_ALIGNMENT = 64
"""Bytes that the address of every tensor is a multiple of: a cache line."""


class TensorShape(msgspec.Struct, frozen=True, array_like=True):
    """Data type and shape of a tensor in a region."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return int(torch.Size(self.shape).numel()) * self.torch_dtype.itemsize

    @property
    def torch_dtype(self) -> torch.dtype:
        """Data type as torch names it."""
        return getattr(torch, self.dtype)  # type: ignore[no-any-return]


class TensorRegion:
    """Shared memory of a fixed size. It can be passed to a process that is started with the spawn method."""

    def __init__(self, size: int, descriptor: int | None = None) -> None:
        """Create a region of ``size`` bytes, or open the one with this file descriptor, which it then owns."""
        self.size = size
        own = os.memfd_create("specdecode-draft", os.MFD_CLOEXEC) if descriptor is None else descriptor
        self._file = os.fdopen(own, "r+b", buffering=0)
        if descriptor is None:
            os.ftruncate(own, size)
        self._bytes = torch.frombuffer(mmap.mmap(own, size), dtype=torch.uint8)

    def __reduce__(self) -> tuple[object, ...]:
        return _open, (self.size, DupFd(self._file.fileno()))

    def put(self, tensors: Sequence[Tensor]) -> tuple[TensorShape, ...]:
        """Copy tensors of any device into the region, and return what `get` needs to find them.

        Tensors of an accelerator are complete when this returns.

        Raises:
            ValueError: The tensors are larger than the region.
        """
        shapes = tuple(TensorShape(str(one.dtype).removeprefix("torch."), tuple(one.shape)) for one in tensors)
        for target, tensor in zip(self.get(shapes), tensors, strict=True):
            target.copy_(tensor)
        return shapes

    def get(self, shapes: Sequence[TensorShape]) -> list[Tensor]:
        """Return views of the tensors of the last `put`. They are valid until the next one, in either process."""
        views, end = [], 0
        for one in shapes:
            begin, end = end, end + one.nbytes
            if end > self.size:
                raise ValueError(f"the tensors of a message take more than the {self.size} bytes that are shared")
            views.append(self._bytes[begin:end].view(one.torch_dtype).view(one.shape))
            end = -(-end // _ALIGNMENT) * _ALIGNMENT
        return views


def _open(size: int, descriptor: Any) -> TensorRegion:
    return TensorRegion(size, descriptor.detach())


# Messages between a worker and its draft process. Tensors are in the shared memory of both.


class Place(msgspec.Struct, frozen=True, array_like=True):
    """Place of a request in the caches: its slot and blocks, and the first slot whose keys the draft attends to."""

    slot: int
    blocks: tuple[int, ...]
    start: int


class Chunk(msgspec.Struct, frozen=True, array_like=True):
    """Chunk of a prompt: ``count`` tokens from position ``first`` on. The bounds are those of the request."""

    place: Place
    first: int
    count: int
    cached_bound: int
    prefilled: int


class Prefill(msgspec.Struct, frozen=True, tag=True):
    """Run of the draft over chunks of prompts.

    Tensors: the tokens of all chunks [T]; for a draft that reads target states also those of the tokens [T, A] and
    those before each chunk [B, A]. The answer is DraftAnswer without tensors.
    """

    chunks: tuple[Chunk, ...]
    tensors: tuple[TensorShape, ...]


class DraftedRow(msgspec.Struct, frozen=True, array_like=True):
    """Row of a step: the draft runs the last ``count`` slots up to the root, and then drafts the tree.

    ``parents`` is (-1,) for a row that only catches up. ``params`` are those of the request, without its grammar.
    """

    place: Place
    count: int
    parents: tuple[int, ...]
    params: SamplingParams


class Propose(msgspec.Struct, frozen=True, tag=True):
    """Drafting of the trees of a step.

    Tensors: the index of each root [B] and the tokens of the slots to run [T]; for a draft that reads target states
    also the states before those slots [T, A]; then the text up to the root of each row in ``texts``, whose penalties
    count tokens. The answer is DraftAnswer with the best target ids behind every node [B, N, K], if a tree has nodes.
    """

    trees: tuple[DraftedRow, ...]
    texts: tuple[int, ...]
    tensors: tuple[TensorShape, ...]


class DraftReady(msgspec.Struct, frozen=True, tag=True):
    """Notice that the draft is loaded."""

    state_json: bytes
    """`DraftState` of the draft as JSON."""
    reads: TargetStates
    """Target states that the draft reads."""
    last_position: int


class DraftAnswer(msgspec.Struct, frozen=True, tag=True):
    """Answer to a message."""

    tensors: tuple[TensorShape, ...] = ()


class DraftFailed(msgspec.Struct, frozen=True, tag=True):
    """Last message of a process that ends with an error."""

    reason: str


ToDraft = Prefill | Propose
FromDraft = DraftReady | DraftAnswer | DraftFailed


# Draft in its own process: it carries out the messages of the worker with a drafter that is local here.
#
# The process has a DeviceState of its own, with the slots and blocks of the worker's. Every message brings all that its
# passes read besides the draft's keys, so nothing but those keys has to last from one message to the next.

_GREEDY = SamplingParams(max_tokens=1, seed=0, temperature=0.0)
_SUBMIT = Submit(request_id="", prompt=(0,), sampling=_GREEDY)
_FINISH = FinishRule.of(_GREEDY, ())


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftServer:
    """Executor of messages on a local drafter, which was built on ``state``. ``vocab_size`` is that of the target."""

    drafter: CapturedDrafter
    loaded: DraftState
    """State of the draft for the report."""
    state: DeviceState
    vocab_size: int

    @torch.inference_mode()
    def run(self, message: ToDraft, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Carry out a message and return the tensors of its answer."""
        match message:
            case Prefill():
                return self._prefill(message, *tensors)
            case Propose():
                return self._propose(message, *tensors)

    def _prefill(
        self, message: Prefill, tokens_T: Tensor, aux_TA: Tensor | None = None, before_BA: Tensor | None = None
    ) -> list[Tensor]:
        """Run the draft over chunks of prompts. Tensors are those of the message."""
        state, begin = self.state, 0
        rows = []
        for b, chunk in enumerate(message.chunks):
            request = self._request(chunk.place)
            request.cached, request.prefilled = chunk.cached_bound, chunk.prefilled
            rows.append(Row(request, chunk.count, start=chunk.first))
            end = begin + chunk.count
            state.tokens_SP[request.slot, chunk.first : chunk.first + chunk.count] = self._here(tokens_T[begin:end])
            if before_BA is not None and chunk.first:
                self._ring[request.slot, (chunk.first - 1) % STATE_RING_POSITIONS] = self._here(before_BA[b])
            begin = end
        states_TA = state.length_S.new_empty(len(tokens_T), 0) if aux_TA is None else self._here(aux_TA)
        self.drafter.prefill(rows, states_TA)
        return []

    def _propose(self, message: Propose, roots_B: Tensor, tokens_T: Tensor, *others: Tensor) -> list[Tensor]:
        """Catch up to the roots and draft the trees. Tensors are those of the message."""
        state, drafter = self.state, self.drafter
        trees = tuple(Tree(one.parents, 1) for one in message.trees)
        rows = [Row(self._request(one.place), 1, tree) for one, tree in zip(message.trees, trees, strict=True)]
        requests, counts = [row.request for row in rows], [one.count for one in message.trees]
        for request, root in zip(requests, roots_B.tolist(), strict=True):
            request.cached = root
            state.set_length(request.slot, root)
        _, index_T, slots_T = catch_up_runs(state, requests, counts)
        state.tokens_SP[slots_T, index_T] = self._here(tokens_T)
        if drafter.reads:
            self._ring[slots_T, (index_T - 1) % STATE_RING_POSITIONS] = self._here(others[0])
        for b, text in zip(message.texts, others[bool(drafter.reads) :], strict=True):
            state.tokens_SP[requests[b].slot, : len(text)] = self._here(text)
        forest = forest_of(trees, self._device)
        slots_B1 = to_device([*(request.slot for request in requests), state.padding_slot], self._device)
        texts = BatchTokens(state.tokens_SP, slots_B1, state.length_S[slots_B1])
        longest = 1 + max(request.cached for request in requests)
        sampler = sampler_of([one.params for one in message.trees], texts, forest, self.vocab_size, longest=longest)
        expand = drafter.first_pass(range(len(rows)), counts, rows, forest, sampler)
        ranked_BNK = draft_trees(rows, forest, state, expand)
        return [] if ranked_BNK is None else [ranked_BNK]

    def _request(self, place: Place) -> Request:
        """Return a request at this place, and write its blocks to the block table."""
        blocks = list(place.blocks)
        columns = list(range(len(blocks)))
        self.state.set_blocks([place.slot] * len(blocks), columns, blocks)
        return Request(
            submit=_SUBMIT,
            sampling_params=_GREEDY,
            finish_rule=_FINISH,
            tokens=[],
            arrived_seconds=0.0,
            slot=place.slot,
            blocks=blocks,
            draft=DraftProgress(start=place.start),
        )

    def _here(self, tensor: Tensor) -> Tensor:
        """Return a tensor of a message on the device of the draft."""
        return tensor.to(self._device)

    @property
    def _ring(self) -> Tensor:
        assert self.state.ring_SRA is not None, "the draft reads no states"
        return self.state.ring_SRA

    @property
    def _device(self) -> torch.device:
        return self.state.length_S.device


# Main function of a draft process: load the draft, then answer messages until the worker closes the pipe.


BuildDraft = Callable[[], DraftServer]
"""Picklable loader of a draft. It raises ModelError if the draft cannot be loaded."""


def main(build: BuildDraft, messages: TensorRegion, answers: TensorRegion, pipe: Connection) -> None:
    """Run the draft process. Exit with 0 when the worker closes the pipe, with 1 after a DraftFailed message."""
    encoder = msgspec.msgpack.Encoder()
    try:
        server, decoder = build(), msgspec.msgpack.Decoder(ToDraft)
        ready = DraftReady(
            state_json=server.loaded.model_dump_json().encode(),
            reads=server.drafter.reads,
            last_position=server.drafter.last_position,
        )
        pipe.send_bytes(encoder.encode(ready))
        while True:
            message = decoder.decode(pipe.recv_bytes())
            shapes = answers.put(server.run(message, messages.get(message.tensors)))
            pipe.send_bytes(encoder.encode(DraftAnswer(shapes)))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        os._exit(0)  # the worker is gone
    except BaseException as error:  # a panic of a Rust library is not an Exception
        traceback.print_exc()
        pipe.send_bytes(encoder.encode(DraftFailed(_reason(error))))
        os._exit(1)


def _reason(error: BaseException) -> str:
    try:
        return describe_failure(error, "the draft")
    except BaseException:
        return f"{type(error).__name__}: {error}"  # the device of this process does not work any more


# Loading of a draft from its folder in a draft process, with the parts of the target that it shares.

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
    name: str
    target_folder: Path
    max_model_len: int
    dtype: torch.dtype
    device: torch.device
    slots: int
    """Number of requests that run at once."""
    blocks: int
    threads: int
    """Number of torch threads."""

    def __call__(self) -> DraftServer:
        """Load the draft. Raise ModelError if it cannot be loaded."""
        torch.set_num_threads(self.threads)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        shared = _SHARED.get(self.config.method, ())
        if self.config.uri is not None and "lm_head.weight" in read_tensor_headers(Path(self.config.uri)):
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
        assert isinstance(loaded.drafter, CapturedDrafter), "the contract allows no other method"
        state.allocate_states(loaded.drafter.reads.width(target.config.hidden_size))
        vocab_size = target.config.vocab_size
        return DraftServer(drafter=loaded.drafter, loaded=loaded.state, state=state, vocab_size=vocab_size)


def _shared_part(
    folder: Path, shared: tuple[str, ...], max_model_len: int, dtype: torch.dtype, device: torch.device
) -> CausalLM:
    """Return the target with the weights that a draft may share; the others stay on the meta device."""
    prepared = prepare_causal_lm(folder, max_model_len=max_model_len)
    target, tensors = prepared.network, {}
    for name in shared:
        module = name.removesuffix(".weight")
        if name in prepared.checkpoint or module in prepared.quantized:
            tensors[name] = nn.Parameter(prepared.read_weight(module).to(device, dtype), requires_grad=False)
    # A draft model shares nothing.
    nothing = nn.Parameter(torch.empty(0, dtype=dtype, device=device), requires_grad=False)
    target.model.embed_tokens.weight = tensors.get("model.embed_tokens.weight", nothing)
    target.lm_head.weight = tensors.get("lm_head.weight", target.model.embed_tokens.weight)
    return target
