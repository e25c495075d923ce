"""Messages between a worker and its draft process. Tensors are in the shared memory of both."""

from __future__ import annotations

import msgspec

from specdecode_worker.engine.drafts.own_device.tensor_region import TensorShape
from specdecode_worker.speculation.sampling.params import SamplingParams


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
    those before each chunk [B, A]. The answer is Done without tensors.
    """

    chunks: tuple[Chunk, ...]
    tensors: tuple[TensorShape, ...]


class Tree(msgspec.Struct, frozen=True, array_like=True):
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
    count tokens. The answer is Done with the best target ids behind every node [B, N, K], if a tree has nodes.
    """

    trees: tuple[Tree, ...]
    texts: tuple[int, ...]
    tensors: tuple[TensorShape, ...]


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Notice that the draft is loaded."""

    state_json: bytes
    """`DraftState` of the draft as JSON."""
    layers: tuple[int, ...]
    final: bool
    """``layers`` and ``final`` are the `TargetStates` that the draft reads."""
    last_position: int


class Done(msgspec.Struct, frozen=True, tag=True):
    """Answer to a message."""

    tensors: tuple[TensorShape, ...] = ()


class Failed(msgspec.Struct, frozen=True, tag=True):
    """Last message of a process that ends with an error."""

    reason: str


ToDraft = Prefill | Propose
FromDraft = Ready | Done | Failed
