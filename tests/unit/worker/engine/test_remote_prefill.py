"""Blocks of a prompt that another engine computes: same text, same acceptance, and no request is lost without them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch

from specdecode_worker.contract import DraftState, TaskMatch
from specdecode_worker.core.messages import Submit, Tokens
from specdecode_worker.drafts.base import LoadedDraft
from specdecode_worker.engine import remote_prefill, transfer
from specdecode_worker.engine.engine import Engine
from specdecode_worker.engine.remote_prefill import BlockExchange
from specdecode_worker.engine.transfer import Blocks
from support.small_llama import ACCESS
from support.worker.accounts import check_engine
from support.worker.small_engine import drain, plan_of, small_engine, submit, texts

PLAN = plan_of("chain:3")
PROMPTS = [[(7 * i + 3 * k * k) % 41 for k in range(69 + 18 * i)] for i in range(3)]


@dataclass
class Two:
    """A prefill worker and a worker that asks it, both driven by the test."""

    prefill: Engine
    worker: Engine
    out: list[Tokens] = field(default_factory=list)

    def run(self, submits: Sequence[Submit], drive: Callable[[], None] | None = None) -> None:
        """Run the requests to their end, stepping both engines unless ``drive`` steps the prefill worker.

        Their text must be that of one engine without peers.
        """
        for one in submits:
            self.worker.add(one)
        deadline = time.monotonic() + 20
        while not self.worker.idle or not (drive or self.prefill.idle):
            assert time.monotonic() < deadline, "the engines do not come to an end"
            if not self.worker.idle:
                self.out += self.worker.step()
            (drive or self._step_prefill)()
        check_engine(self.worker)
        answers = texts(self.out)
        assert {one.request_id: answers[one.request_id] for one in submits} == texts(alone(submits))

    def _step_prefill(self) -> None:
        if not self.prefill.idle:
            self.prefill.step()

    @property
    def counters(self) -> tuple[int, int, int]:
        """Requests that asked, those that went on without all blocks, and tokens that arrived."""
        counters = self.worker._scheduler.counters
        return counters.remote_prefills, counters.remote_prefill_failures, counters.remote_prefill_tokens


def opened(role: str, peers: Sequence[str] = (), **options: object) -> Engine:
    """Return an engine with an open exchange. Its prompt tokens are measured as slow, so that it asks its peers."""
    engine = small_engine(exchange=role, **options)  # type: ignore[arg-type]
    engine.set_plan(PLAN.model_copy(update={"prefill": tuple(peers)}))
    engine.open_exchange(("127.0.0.1", 0), lambda: None)
    engine._scheduler.prefill_limit.token_seconds = 1.0 if role == "worker" else 1e-4
    for peer in engine._exchange._peers.values():
        peer.token_seconds = 1e-4
    return engine


def port(engine: Engine) -> int:
    return engine._exchange.server.port


def joined(prefill: Engine, **options: object) -> Two:
    """Return a prefill worker with a worker that asks it."""
    return Two(prefill, opened("worker", [f"127.0.0.1:{port(prefill)}"], **options))


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """No transfer ends because this machine is busy."""
    monkeypatch.setattr(remote_prefill, "PATIENCE_SECONDS", 30.0)


@pytest.fixture
def two() -> Iterator[Two]:
    made = joined(opened("prefill"))
    yield made
    made.prefill.close()
    made.worker.close()


def alone(submits: Sequence[Submit]) -> list[Tokens]:
    """Return what one engine without peers answers."""
    engine = small_engine()
    engine.set_plan(PLAN)
    for one in submits:
        engine.add(one)
    return drain(engine)


def accepted(out: list[Tokens]) -> dict[str, tuple[int, int]]:
    return {new.request_id: (new.draft_tokens, new.accepted) for new in out}


def requests(**fields: object) -> list[Submit]:
    return [submit(f"r{i}", prompt, **fields) for i, prompt in enumerate(PROMPTS)]  # type: ignore[arg-type]


def test_same_text_and_acceptance_as_with_a_local_prefill(two: Two) -> None:
    submits = requests(temperature=0.7, max_tokens=24)
    two.run(submits)
    local = alone(submits)
    assert accepted(two.out) == accepted(local)
    assert sum(count for _, count in accepted(local).values()) > 20, "the draft is accepted at all"
    asked, failures, tokens = two.counters
    assert (asked, failures) == (3, 0)
    assert tokens == sum((len(prompt) - 1) // 16 * 16 for prompt in PROMPTS)
    assert not any(new.cached_tokens for new in two.out), "clients see no cache hit"


def test_lost_keys_of_the_draft_change_acceptance_and_not_the_text(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    # The bug that this guards against: https://github.com/vllm-project/vllm/issues/54926
    submits = requests(max_tokens=24)
    write = remote_prefill.BlockParts.write

    def forget(self: remote_prefill.BlockParts, request, rows, blocks, arrived) -> None:  # type: ignore[no-untyped-def]
        write(self, request, rows, blocks, {k: v for k, v in arrived.items() if not k.startswith("draft")})

    monkeypatch.setattr(remote_prefill.BlockParts, "write", forget)
    two.run(submits)
    assert accepted(two.out) != accepted(alone(submits))


def test_salts_travel_and_separate(two: Two) -> None:
    first, other = submit("a", PROMPTS[2], cache_salt="tenant-a"), submit("b", PROMPTS[2], cache_salt="tenant-b")
    two.run([first])
    two.run([other])
    asked, failures, tokens = two.counters
    assert (asked, failures) == (2, 0)
    assert tokens == 2 * ((len(PROMPTS[2]) - 1) // 16 * 16), "nothing of one tenant serves the other"
    two.run([submit("c", PROMPTS[2], cache_salt="tenant-a")])
    assert two.counters[0] == 2, "the blocks of the first tenant are cached now"
    assert two.out[-1].cached_tokens == (len(PROMPTS[2]) - 1) // 16 * 16


def test_ignored_salt_is_noticed(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    take = transfer.BlockServer.take_wants

    def without_salt(self: transfer.BlockServer) -> list[transfer.Outgoing]:
        wants = take(self)
        for outgoing in wants:
            outgoing.want = transfer.msgspec.structs.replace(outgoing.want, salt="")
        return wants

    monkeypatch.setattr(transfer.BlockServer, "take_wants", without_salt)
    two.run([submit("a", PROMPTS[2], cache_salt="tenant-a")])
    assert two.counters == (1, 1, 0)


def test_blocks_of_another_text_are_refused(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    offer = transfer.Outgoing.offer

    def swapped(self: transfer.Outgoing, blocks: Blocks, count: int, read: Callable[[], object]) -> bool:
        others = tuple(digest[::-1] for digest in blocks.digests)
        wrong = transfer.msgspec.structs.replace(blocks, digests=others)
        return offer(self, wrong, count, read)  # type: ignore[arg-type]

    monkeypatch.setattr(transfer.Outgoing, "offer", swapped)
    two.run(requests())
    assert two.counters[1] >= 1
    assert two.counters[2] == 0


def test_prefix_that_is_cached_is_not_asked_for(two: Two) -> None:
    two.run([submit("a", PROMPTS[2])])
    before = two.counters[2]
    two.run([submit("b", PROMPTS[2] + PROMPTS[0])])
    assert two.counters[2] - before == (len(PROMPTS[2] + PROMPTS[0]) - 1) // 16 * 16 - len(PROMPTS[2]) // 16 * 16


def test_peer_that_is_gone_costs_no_request(two: Two) -> None:
    two.prefill.close()
    assert two.prefill._exchange is not None
    two.run(requests(), drive=lambda: None)
    asked, failures, tokens = two.counters
    assert failures == asked >= 1
    assert tokens == 0
    two.run([submit("later", PROMPTS[1][::-1])], drive=lambda: None)
    assert two.counters[0] == asked, "a peer that failed is left alone for a while"


def test_peer_that_was_slow_once_is_asked_again(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stop amid a step makes a peer look hopeless to itself and to others, who would never learn that it is not."""
    two.prefill._scheduler.prefill_limit.token_seconds = 1e6
    two.prefill._exchange.server.load = 0, 1e6
    two.run([submit("a", PROMPTS[0])])
    two.run([submit("b", PROMPTS[1])])
    assert two.counters == (0, 0, 0), "by what it says of itself"
    monkeypatch.setattr(time, "monotonic", lambda clock=time.monotonic: clock() + remote_prefill.FORGET_SECONDS)
    two.worker._scheduler.prefill_limit.token_seconds = 1.0
    two.worker.add(submit("running", PROMPTS[2][:5], max_tokens=60))
    two.worker.step()
    two.run([submit("c", PROMPTS[2][::-1])])
    assert two.counters[0] == 1
    assert two.counters[2] > 0


def test_silent_peer_is_given_up(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "SILENCE_SECONDS", 0.1)
    two.run(requests()[:1], drive=lambda: None)  # the prefill worker takes the connection and computes nothing
    assert two.counters == (1, 1, 0)


def test_want_of_a_worker_that_has_left_is_dropped(two: Two) -> None:
    two.worker.add(submit("a", PROMPTS[2]))
    deadline = time.monotonic() + 10
    while two.prefill.idle:
        assert time.monotonic() < deadline
        two.worker.step()
    two.prefill._exchange_blocks(two.prefill._exchange)  # type: ignore[arg-type]
    assert two.prefill._requests
    two.worker.abort("a")
    while not two.prefill.idle:
        assert time.monotonic() < deadline, "the want is not dropped"
        two.prefill._exchange_blocks(two.prefill._exchange)  # type: ignore[arg-type]
    assert two.prefill._scheduler.counters.prefill_chunks == 0, "nothing was computed for it"
    check_engine(two.prefill)


def test_peer_of_another_key_draft_or_role_is_left() -> None:
    other = opened("prefill", access=replace(ACCESS, compatibility="another"))
    undrafted, worker = opened("prefill", draft=False), opened("worker")
    for prefill in (other, undrafted, worker):
        two = joined(prefill)
        two.run(requests()[:1])
        assert two.counters == (1, 1, 0)
        prefill.close()


def swap_draft(engine: Engine) -> None:
    engine.set_draft("", LoadedDraft(engine.loaded_draft().drafter, DraftState(method="eagle3", hash="other")))  # type: ignore[union-attr]


def change_draft_of_task(engine: Engine) -> None:
    drafter = engine.loaded_draft().drafter  # type: ignore[union-attr]
    engine.set_draft("second", LoadedDraft(drafter, DraftState(method="eagle3", hash="other")))
    tasks = (TaskMatch(name="other", draft="second"),)
    engine.set_plan(PLAN.model_copy(update={"version": 2, "tasks": tasks}))


@pytest.mark.parametrize("change", [swap_draft, change_draft_of_task])
def test_draft_that_changes_during_an_export_costs_no_more_than_its_keys(change: Callable[[Engine], None]) -> None:
    prefill = opened("prefill", budget=32)
    two = joined(prefill)
    exchange, changes = prefill._exchange, [change]
    assert exchange is not None

    def drive() -> None:
        prefill.step()
        if changes and any(export.following for export in exchange._exports.values()):
            changes.pop()(prefill)

    two.run([submit("a", PROMPTS[2], max_tokens=24)], drive=drive)
    assert not changes
    assert two.counters == (1, 0, (len(PROMPTS[2]) - 1) // 16 * 16)
    prefill.close()


def test_short_prompt_and_fast_engine_stay_local(two: Two) -> None:
    two.worker._scheduler.prefill_limit.token_seconds = 1e-7
    two.run(requests())
    assert two.counters[0] == 0


def test_moved_stream_takes_its_blocks_along(two: Two) -> None:
    # The stream ran on a worker, which still has its blocks, those of the answer included.
    first = small_engine(exchange="worker")
    first.set_plan(PLAN)
    first.open_exchange(("127.0.0.1", 0), lambda: None)
    whole = submit("a", PROMPTS[2], max_tokens=60)
    local = texts(alone([whole]))["a"]
    first.add(whole)
    emitted: list[int] = []
    while len(emitted) < 40:
        emitted += [token for new in first.step() for token in new.tokens]
    first.abort("a")
    moved = Two(first, opened("worker"))
    address = f"127.0.0.1:{port(first)}"
    resumed = transfer.msgspec.structs.replace(whole, emitted=tuple(emitted), blocks_at=address)
    moved.run([resumed])
    assert emitted + texts(moved.out)["a"] == local
    asked, failures, tokens = moved.counters
    assert (asked, failures) == (1, 0), "the last block may be missing"
    assert tokens >= (len(PROMPTS[2]) + len(emitted) - 20) // 16 * 16


def test_full_cache_computes_the_prompt_itself() -> None:
    prefill = opened("prefill")
    two = joined(prefill, blocks=14)
    two.run(requests(max_tokens=30))
    prefill.close()


def test_prefill_worker_has_the_keys_of_its_draft_without_a_plan() -> None:
    prefill = opened("prefill")
    prefill.set_plan(PLAN.model_copy(update={"version": 2, "rows": ()}))
    two = joined(prefill)
    submits = requests(max_tokens=24)
    two.run(submits)
    assert accepted(two.out) == accepted(alone(submits))
    prefill.close()


def test_blocks_in_flight_are_bounded(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    exchange = two.prefill._exchange
    assert isinstance(exchange, BlockExchange)
    one = sum(exchange._parts.sizes(_request(two.worker), draft=True).values())
    monkeypatch.setattr(remote_prefill, "MAX_FRAME_BYTES", one)
    monkeypatch.setattr(exchange.server.budget, "_most", 2 * one)
    held: list[int] = []
    take = transfer.ByteBudget.take

    def watched(self: transfer.ByteBudget, count: int, seconds: float) -> bool:
        taken = take(self, count, seconds)
        held.append(exchange.server.budget._held)  # type: ignore[union-attr]
        return taken

    monkeypatch.setattr(transfer.ByteBudget, "take", watched)
    two.run(requests())
    assert 0 < max(held) <= 2 * one
    assert exchange.server.budget._held == 0
    assert two.counters[1] == 0


def _request(engine: Engine):  # type: ignore[no-untyped-def]
    from specdecode_worker.core.request import Request

    request = Request.of(submit("x"), (), arrived_seconds=0.0)
    engine._drafts.assign_draft(request)
    return request


def test_parts_of_the_networks_come_back_as_they_were(two: Two) -> None:
    parts = two.worker._exchange._parts  # type: ignore[union-attr]
    request = _request(two.worker)
    names = list(parts.sizes(request, draft=True))
    assert len(names) == 3, "target, draft and states"
    states = two.worker._state.block_aux_NA
    caches = (two.worker._target.cache.data, two.worker._drafts.loaded().drafter.kv_cache.data)  # type: ignore[union-attr]
    for tensor in (states, *caches):
        tensor.copy_(torch.randn_like(tensor))
    before = [states[[3, 5]].clone(), *(cache[:, :, [3, 5]].clone() for cache in caches)]  # type: ignore[index]
    views = parts.read(request, [3, 5], names)()
    arrived = {name: torch.frombuffer(bytearray(view), dtype=torch.uint8).view(2, -1)
               for name, view in zip(names, views, strict=True)}  # fmt: skip
    parts.write(request, [0, 1], [9, 8], {name: rows.clone() for name, rows in arrived.items()})
    after = [states[[9, 8]], *(cache[:, :, [9, 8]] for cache in caches)]  # type: ignore[index]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
