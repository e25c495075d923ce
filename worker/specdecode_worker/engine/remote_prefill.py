"""Blocks of prompts from and for other workers: which requests wait for them, and import and export between steps.

A request whose prompt is long and not cached costs every running stream the time of its prefill. `BlockExchange.park`
therefore compares costs in request-seconds: the time of a local prefill for the request and for all that run or wait,
against the time until the blocks of a prefill worker are here, for the request alone. Both follow from measured times
of prompt tokens, the bandwidth of earlier transfers and the queue that the peer reports. A parked request is outside of
the scheduler, as one is whose grammar is compiled. Its blocks are stored as they arrive, without an owner. When the
last one is here, or the transfer ends in any other way, the request goes to the scheduler, which finds what is there.

A prefill worker runs an ordinary request of one token for each want. Blocks are exported from the prefix index, where
they are from the launch of their step on: the copy is queued on the device behind that step, and before anything that
could overwrite it.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b

import torch
from torch import Tensor

from specdecode_kernels.transfer import to_device
from specdecode_worker.core.device_state import DeviceState, PagedCache, to_host
from specdecode_worker.core.kv_cache import BLOCK_SIZE, blocks_for
from specdecode_worker.core.messages import Submit
from specdecode_worker.core.request import Request
from specdecode_worker.drafts.registry import DraftRegistry
from specdecode_worker.engine.scheduler import Scheduler, StoredBlock
from specdecode_worker.engine.target import Target
from specdecode_worker.engine.transfer import (
    MAX_CONNECTIONS,
    MAX_FRAME_BYTES,
    MAX_IN_FLIGHT_BYTES,
    TARGET_PART,
    AllSent,
    ArrivedBlocks,
    BlockFetch,
    Blocks,
    BlockServer,
    ByteBudget,
    Outgoing,
    Refused,
    TransferAccess,
    Want,
    Welcome,
)
from specdecode_worker.sampling.params import Sampling

log = logging.getLogger(__name__)

FIRST_BANDWIDTH = 1e9
"""Bytes a second that a transfer is expected to have before one was measured: about 10 Gb/s."""
PATIENCE = 3.0
"""Blocks may take this many times as long as expected, and PATIENCE_SECONDS more."""
PATIENCE_SECONDS = 2.0
MOST_RETRY_SECONDS = 30.0
"""Longest time for which a peer is left alone that has failed. It begins at one second and doubles."""
FORGET_SECONDS = 30.0
"""Time after which the times of a peer that was not asked are forgotten, so that one bad measurement does not last."""
STEP_IMPORT_BYTES = 2 * MAX_FRAME_BYTES
"""Bytes that are stored between two steps."""
_DRAFT_PART = "draft "
_STATES_PART = "states "


class _StoredStates:
    """Stored states of the target, with the interface of `PagedCache` for whole blocks."""

    def __init__(self, block_aux_NA: Tensor) -> None:
        self.bits = block_aux_NA
        self.block_bytes = block_aux_NA[0].numel() * block_aux_NA.element_size()

    def read_blocks(self, blocks: Sequence[int]) -> Tensor:
        return self.bits[to_device(blocks, self.bits.device, dtype=torch.int64)]

    def write_blocks(self, blocks: Sequence[int], rows_NA: Tensor) -> None:
        self.bits[to_device(blocks, self.bits.device, dtype=torch.int64)] = rows_NA


class BlockParts:
    """Parts of cache blocks as bytes: keys and values of target and draft, and the target's stored states."""

    def __init__(self, target: Target, drafts: DraftRegistry, state: DeviceState) -> None:
        self._target, self._drafts, self._state = target, drafts, state

    @property
    def on_gpu(self) -> bool:
        """True if blocks are copied from and to another device than the host."""
        return self._state.length_S.is_cuda

    def sizes(self, request: Request, *, draft: bool) -> dict[str, int]:
        """Return the bytes of each part of a block of a request, with the keys of its draft or without."""
        parts = ((name, one) for name, one in self._of(request).items() if draft or not name.startswith(_DRAFT_PART))
        return {name: 0 if one is None else one.block_bytes for name, one in parts}

    def are_whole(self, request: Request) -> bool:
        """Return whether a block has the keys of all drafts of a request; those of merged drafts are in none."""
        others = [self._drafts.loaded(one.draft) for one in self._drafts.tasks.merged(request.submit.task)]
        return all(one is None or one.drafter.kv_cache is None for one in others)

    def read(self, request: Request, blocks: Sequence[int], names: Iterable[str]) -> Callable[[], list[memoryview]]:
        """Queue copies of blocks to the host, and return the function that waits for them."""
        parts = self._of(request)
        read = [part.read_blocks(blocks) for name in names if (part := parts[name]) is not None]
        copies, done = to_host([one.contiguous().view(-1).view(torch.uint8) for one in read])

        def wait() -> list[memoryview]:
            done.wait()
            return [copy.numpy().data for copy in copies]

        return wait

    def write(self, request: Request, rows: Sequence[int], blocks: Sequence[int], arrived: dict[str, Tensor]) -> None:
        """Write rows of arrived parts, [count, bytes] each, to blocks. Parts that are not used any more are dropped."""
        parts, device = self._of(request), self._state.length_S.device
        for name, rows_CB in arrived.items():
            if (part := parts.get(name)) is not None:
                rows_NB = rows_CB if len(rows) == len(rows_CB) else rows_CB[list(rows)]
                part.write_blocks(blocks, rows_NB.to(device, non_blocking=True).view(part.bits.dtype))

    def marks(self, request: Request, names: Iterable[str]) -> tuple[str, bool]:
        """Return the draft whose keys are among these parts and can be used now, and whether the states are too."""
        usable = [name for name in names if name in self._of(request)]
        draft = next((name.removeprefix(_DRAFT_PART) for name in usable if name.startswith(_DRAFT_PART)), "")
        return draft, any(name.startswith(_STATES_PART) for name in usable)

    def _of(self, request: Request) -> dict[str, PagedCache | _StoredStates | None]:
        """Return the parts of a request's blocks by name, which has the hash of a draft, or says what states are.

        A draft without a cache has no bytes.
        """
        parts: dict[str, PagedCache | _StoredStates | None] = {TARGET_PART: self._target.cache}
        loaded = self._drafts.loaded(self._drafts.tasks.name(request.submit.task))
        if loaded is not None and request.draft.draft == loaded.state.hash:
            parts[_DRAFT_PART + loaded.state.hash] = loaded.drafter.kv_cache
        if self._state.block_aux_NA is not None:
            reads = self._drafts.reads
            name = f"{_STATES_PART}{','.join(map(str, reads.layers))}{' final' * reads.final}"
            parts[name] = _StoredStates(self._state.block_aux_NA)
        return parts


# Requests that wait for blocks of a peer.


@dataclass(slots=True)
class _Peer:
    """Another worker, and what is known of it. Times are in seconds."""

    address: str
    token_seconds: float = 0.0
    latency: float = 0.0
    bandwidth: float = FIRST_BANDWIDTH
    failures: int = 0
    retry_at: float = 0.0
    forget_at: float = math.inf

    def seconds(self, tokens: int, nbytes: int, token_seconds: float) -> float:
        """Return the expected time until all blocks are here. Blocks travel while later ones are computed."""
        return self.latency + max(tokens * (self.token_seconds or token_seconds), nbytes / self.bandwidth)

    def record(self, fetch: BlockFetch, now: float) -> None:
        """Record how a transfer ended."""
        if fetch.wire_seconds > 0:
            self.bandwidth = (self.bandwidth + fetch.wire_bytes / fetch.wire_seconds) / 2
        self.failures = self.failures + 1 if fetch.problem else 0
        if self.failures:
            self.retry_at = now + min(2.0 ** (self.failures - 1), MOST_RETRY_SECONDS)


@dataclass(slots=True)
class _Parked:
    request: Request
    peer: _Peer
    fetch: BlockFetch


@dataclass(slots=True)
class _Export:
    request: Request
    outgoing: Outgoing
    following: int
    """Number of the next block to send."""


class BlockExchange:
    """Blocks that this engine gets from other workers, and those that it sends them."""

    def __init__(self, parts: BlockParts, scheduler: Scheduler, access: TransferAccess, *, computes: bool) -> None:
        """Create an exchange that neither listens nor has peers.

        Args:
            parts: What a block consists of.
            scheduler: Scheduler of the engine.
            access: What the workers of the deployment have in common.
            computes: This is a prefill worker: it computes blocks for others, and asks for none.
        """
        self.server: BlockServer | None = None
        self.computes = computes
        self._opened = False
        self._parts, self._scheduler, self._access = parts, scheduler, access
        self._peers: dict[str, _Peer] = {}
        self._parked: dict[str, _Parked] = {}
        self._exports: dict[str, _Export] = {}
        self._exported = 0
        self._budget = ByteBudget(MAX_IN_FLIGHT_BYTES)
        self._news = threading.Event()
        self._wake: Callable[[], None] = self._news.set

    def open(self, address: tuple[str, int] | None, most_tokens: int, wake: Callable[[], None]) -> None:
        """Begin to work: requests may be parked from now on. ``wake`` ends the sleep of the engine, from any thread.

        Raises:
            OSError: The address cannot be listened on. Without one, nobody gets blocks from here.
        """

        def notify() -> None:
            self._news.set()
            wake()

        self._wake, self._opened = notify, True
        if address is not None:
            self.server = BlockServer(address, self._access, most_tokens, notify)
            self.server.load = 0, self._scheduler.prefill_limit.token_seconds

    @property
    def busy(self) -> bool:
        """True if blocks are on their way to another worker, or are wanted there."""
        return bool(self._exports) or (self.server is not None and self.server.has_wants)

    def __bool__(self) -> bool:
        return bool(self._parked) or self.busy

    def __contains__(self, request: Request) -> bool:
        return request.id in self._parked

    def set_peers(self, addresses: Iterable[str]) -> None:
        """Set the prefill workers to ask. What is known of those that stay is kept."""
        self._peers = {address: self._peers.get(address) or _Peer(address) for address in addresses}

    def park(self, request: Request, now: float, *, draft: bool) -> bool:
        """Ask for the blocks of a request if that is worth it. Return whether the request waits for them now.

        Args:
            request: A request that is not in the scheduler yet.
            now: Time of the monotonic clock.
            draft: Drafts process prompts.
        """
        source = request.submit.blocks_at
        if not self._opened or self.computes or not (self._peers or source) or len(self._parked) >= MAX_CONNECTIONS:
            return False
        if not self._parts.are_whole(request):
            return False
        first, end = self._scheduler.missing_blocks(request)
        scheduler, count, limit = self._scheduler, end - first, self._scheduler.prefill_limit
        local = limit.token_seconds * count * BLOCK_SIZE
        peer = _Peer(source) if source else self._peer(request, now)
        if not local or peer is None:
            return False
        is_forgotten = now >= peer.forget_at
        if is_forgotten:
            peer.token_seconds = peer.latency = 0.0
        sizes = self._parts.sizes(request, draft=draft)
        tokens, nbytes = 0 if source else end * BLOCK_SIZE, count * sum(sizes.values())
        gain = local * (1 + len(scheduler.running) + len(scheduler.waiting))
        if gain <= peer.seconds(tokens, nbytes, limit.token_seconds):
            return False

        def consider(load: Welcome, latency: float) -> float:
            peer.latency = latency
            if not is_forgotten:  # else what it measured last may be as old
                peer.token_seconds = load.token_seconds or peer.token_seconds
            queued = 0 if source else load.queued_tokens
            expected = peer.seconds(tokens + queued, nbytes, limit.token_seconds)
            return PATIENCE * expected + PATIENCE_SECONDS if gain > expected else 0.0

        want = Want(
            tokens=array("i", request.tokens[: end * BLOCK_SIZE + 1]).tobytes(),
            salt=request.submit.cache_salt,
            task=request.submit.task,
            parts=sizes,
            first=first,
            compute=not source,
            seconds=0.0,
        )
        fetch = BlockFetch(
            peer.address,
            self._access,
            want,
            scheduler.reuse.digests(request, end)[first:end],
            budget=self._budget,
            allocate=self._allocate,
            consider=consider,
            notify=self._wake,
        )
        peer.forget_at = now + FORGET_SECONDS
        self._parked[request.id] = _Parked(request, peer, fetch)
        return True

    def discard(self, request: Request) -> None:
        """Withdraw the want of a cancelled request."""
        self._parked.pop(request.id).fetch.close()

    def wait(self, seconds: float) -> None:
        """Wait for news of a connection."""
        self._news.wait(seconds)

    def take_ready(self, now: float) -> list[Request]:
        """Store the blocks that have arrived, and return the requests that wait no longer."""
        self._news.clear()
        ready, left = [], STEP_IMPORT_BYTES
        for parked in list(self._parked.values()):
            fetch, ended = parked.fetch, parked.fetch.ended
            problem = ""
            while left > 0 and not problem and (arrived := fetch.take()) is not None:
                problem = "" if self._store(parked, arrived) else "there is no room for its blocks"
                left -= arrived.nbytes
                fetch.release(arrived)
            if problem or (ended and left > 0):
                fetch.close()
                self._end(parked, problem or fetch.problem, now)
                ready.append(parked.request)
        return ready

    def _end(self, parked: _Parked, problem: str, now: float) -> None:
        del self._parked[parked.request.id]
        parked.peer.record(parked.fetch, now)
        self._scheduler.counters.remote_prefills += not parked.fetch.declined
        if problem:
            self._scheduler.counters.remote_prefill_failures += 1
            log.warning("a request goes on without blocks of %s: %s", parked.peer.address, problem)

    def _store(self, parked: _Parked, arrived: ArrivedBlocks) -> bool:
        """Write blocks to the cache. Return False if there is no room for them."""
        request, blocks = parked.request, arrived.blocks
        count = len(blocks.digests)
        draft, states = self._parts.marks(request, blocks.parts)
        adopted = self._scheduler.reuse.adopt(
            request,
            blocks.first,
            count,
            blocks_for(len(request.tokens)) - blocks.first,
            draft=draft,
            states=states,
            followed=blocks.followed,
        )
        if adopted is None:
            return False
        if adopted:
            payload: Tensor = arrived.payload
            in_order = torch.split(payload, [count * parked.fetch.want.parts[name] for name in blocks.parts])
            parts = {name: one.view(count, -1) for name, one in zip(blocks.parts, in_order, strict=True) if len(one)}
            rows = [number - blocks.first for number in adopted]
            self._parts.write(request, rows, list(adopted.values()), parts)
        request.imported += len(adopted) * BLOCK_SIZE
        self._scheduler.counters.remote_prefill_tokens += len(adopted) * BLOCK_SIZE
        self._scheduler.counters.remote_prefill_bytes += arrived.nbytes
        return True

    def _peer(self, request: Request, now: float) -> _Peer | None:
        """Return the prefill worker of a request: the same for all texts with the same first block, while it works."""
        usable = [peer for peer in self._peers.values() if peer.retry_at <= now]
        first = self._scheduler.reuse.digests(request, min(1, blocks_for(len(request.tokens)) - 1))
        text = first[0] if first else b""
        return max(usable, key=lambda one: blake2b(one.address.encode() + text).digest(), default=None)

    def _allocate(self, nbytes: int) -> tuple[Tensor, memoryview]:
        payload = torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._parts.on_gpu)
        return payload, payload.numpy().data

    # Blocks for other workers.

    def take_wants(self) -> list[tuple[Submit, Outgoing]]:
        """Return the new wants as requests, after refusing those that this worker serves to nobody."""
        if self.server is None:
            return []
        wants = []
        for outgoing in self.server.take_wants():
            want = outgoing.want
            tokens = array("i", want.tokens)
            if want.compute and not self.computes:
                outgoing.finish(Refused("this is no prefill worker"))
            elif len(tokens) <= want.first * BLOCK_SIZE + 1 or want.first < 0:
                outgoing.finish(Refused("no block is wanted"))
            else:
                self._exported += 1
                submit = Submit(
                    request_id=f"{_EXPORT}{self._exported}",
                    prompt=tuple(tokens),
                    sampling=Sampling(max_tokens=1, seed=0, temperature=0.0, ignore_eos=True),
                    task=want.task,
                    cache_salt=want.salt,
                    arrival_seconds=time.monotonic(),
                )
                wants.append((submit, outgoing))
        return wants

    def export(self, request: Request, outgoing: Outgoing) -> str:
        """Begin to send the blocks of a request. Return why it is refused; empty if it is not."""
        want = outgoing.want
        own = self._parts.sizes(request, draft=True)
        if any(own.get(name) != size for name, size in want.parts.items()):
            return "blocks consist of other parts here, for example of another draft's"
        request.renews_prefix = True
        self._exports[request.id] = _Export(request, outgoing, want.first)
        return ""

    def advance_exports(self, is_alive: Callable[[str], bool]) -> list[str]:
        """Queue the blocks that have been computed, and return the ids of requests that nobody waits for any more.

        Args:
            is_alive: Function that returns whether the request of this id is still under way.
        """
        abandoned = []
        for key, export in list(self._exports.items()):
            if export.outgoing.gone:
                del self._exports[key]
                abandoned.append(key)
            elif self._send(export, alive=is_alive(key)):
                del self._exports[key]
                export.outgoing.finish(AllSent())
        if self.server is not None:
            self.server.load = self._scheduler.queued_prompt_tokens, self._scheduler.prefill_limit.token_seconds
        return abandoned

    def _send(self, export: _Export, *, alive: bool) -> bool:
        """Queue blocks while there is room. Return True if there will be no more of them."""
        request, parts = export.request, export.outgoing.want.parts
        end = (len(request.submit.prompt) - 1) // BLOCK_SIZE
        # Since the export began, a swap or a plan may have changed the draft, or the states that drafts read.
        own = self._parts.sizes(request, draft=True)
        wanted = [name for name in parts if name in own]
        most = max(MAX_FRAME_BYTES // max(sum(parts.values()), 1), 1)
        while export.following < end:
            stop = min(export.following + most, end)
            blocks: list[StoredBlock] = []
            names: tuple[str, ...] = ()
            for k, block in enumerate(self._scheduler.reuse.stored(request, export.following, stop), export.following):
                has = self._names(wanted, block)
                # A block without the draft's keys is about to be replaced, unless the request is past it.
                is_final = len(has) == len(wanted) or not alive or k < request.published
                if not is_final or (blocks and (has, block.followed) != (names, blocks[0].followed)):
                    break
                blocks.append(block)
                names = has
            if not blocks:
                return not alive
            message = Blocks(
                first=export.following,
                digests=tuple(block.digest for block in blocks),
                parts=names,
                followed=blocks[0].followed,
            )
            count = len(blocks) * sum(parts[name] for name in names)
            copy = partial(self._parts.read, request, [block.block for block in blocks], names)
            if not export.outgoing.offer(message, count, copy):
                return False
            export.following += len(blocks)
        return True

    @staticmethod
    def _names(wanted: Iterable[str], block: StoredBlock) -> tuple[str, ...]:
        """Return the wanted parts that a stored block has."""
        has = {_DRAFT_PART: block.draft, _STATES_PART: block.states}
        return tuple(name for name in wanted if has.get(name.partition(" ")[0] + " ", True))

    def close(self) -> None:
        """Stop listening, and withdraw all wants."""
        for parked in self._parked.values():
            parked.fetch.close()
        if self.server is not None:
            self.server.close()


_EXPORT = "blocks-"
"""Beginning of the ids of requests that are computed for other workers."""
