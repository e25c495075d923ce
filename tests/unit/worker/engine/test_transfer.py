"""The socket between engines under peers that are hostile, slow, or not who they say they are."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from specdecode_worker.engine import transfer
from specdecode_worker.engine.transfer import (
    MAX_CONNECTIONS,
    TARGET_PART,
    AllSent,
    BlockFetch,
    Blocks,
    BlockServer,
    ByteBudget,
    Challenge,
    Hello,
    Outgoing,
    Refused,
    StillComputing,
    TransferAccess,
    Want,
    Welcome,
)
from support.certificates import self_signed
from support.waiting import until

ACCESS = TransferAccess("key", lambda: ("token",))
SIZE = 3000
WANT = Want(tokens=b"\0" * 4 * 33, salt="s", task="t", parts={TARGET_PART: SIZE, "draft d": 5}, first=0, compute=True,
            seconds=0)  # fmt: skip
DIGESTS = (b"a" * 16, b"b" * 16)


@pytest.fixture
def server() -> Iterator[BlockServer]:
    made = BlockServer(("127.0.0.1", 0), ACCESS, 100, lambda: None)
    made.load = 7, 0.5
    yield made
    made.close()


def fetch(
    port: int, access: TransferAccess = ACCESS, want: Want = WANT, *, most: int = 1 << 20, **options: Any
) -> BlockFetch:
    def allocate(count: int) -> tuple[bytearray, memoryview]:
        data = bytearray(count)
        return data, memoryview(data)

    given: dict[str, Any] = {
        "budget": ByteBudget(most),
        "allocate": allocate,
        "consider": lambda load, latency: 5.0,
        "notify": lambda: None,
        **options,
    }
    return BlockFetch(f"127.0.0.1:{port}", access, want, DIGESTS, **given)


def offer(
    outgoing: Outgoing, number: int, fill: bytes = b"x", parts: tuple[str, ...] = (TARGET_PART, "draft d")
) -> None:
    blocks = Blocks(first=number, digests=(DIGESTS[number],), parts=parts, followed=True)
    data = b"".join(fill * WANT.parts[name] for name in parts)
    assert outgoing.offer(blocks, len(data), lambda: lambda: [memoryview(data)])


def one_want(server: BlockServer) -> Outgoing:
    (outgoing,) = until(server.take_wants)
    return outgoing


def ended(made: BlockFetch) -> str:
    until(lambda: made.ended)
    return made.problem


def test_blocks_arrive_in_order_with_the_load_of_the_server(server: BlockServer) -> None:
    loads: list[Welcome] = []

    def consider(load: Welcome, latency: float) -> float:
        loads.append(load)
        return 5.0

    made = fetch(server.port, consider=consider)
    outgoing = one_want(server)
    assert (outgoing.want.tokens, outgoing.want.salt, outgoing.want.task) == (WANT.tokens, "s", "t")
    offer(outgoing, 0)
    offer(outgoing, 1, b"y", (TARGET_PART,))
    outgoing.finish(AllSent())
    assert ended(made) == ""
    first, second = made.take(), made.take()
    assert bytes(first.payload) == b"x" * (SIZE + 5)
    assert (bytes(second.payload), second.blocks.parts) == (b"y" * SIZE, (TARGET_PART,))
    assert [(one.queued_tokens, one.token_seconds) for one in loads] == [(7, 0.5)]
    until(lambda: not server.budget._held)


def test_load_can_be_too_high(server: BlockServer) -> None:
    made = fetch(server.port, consider=lambda load, latency: 0.0)
    assert (ended(made), made.declined) == ("", True)
    assert not server.has_wants


@pytest.mark.parametrize("of", ["client", "server"])
def test_wrong_token_gets_nothing(of: str, server: BlockServer) -> None:
    other = replace(ACCESS, read_tokens=lambda: ("guess",))
    if of == "server":
        server.close()
        server = BlockServer(("127.0.0.1", 0), replace(ACCESS, read_tokens=lambda: ("guess",)), 100, lambda: None)
        other = ACCESS
    made = fetch(server.port, other)
    assert "not the token" in ended(made)
    assert not server.has_wants
    server.close()


def test_server_that_repeats_proofs_is_noticed() -> None:
    """A server that does not know the token cannot answer with what the client has just sent."""

    def serve(connection: socket.socket) -> None:
        send(connection, Challenge("key", b"n" * 16))
        hello = receive(connection, Hello)
        send(connection, Welcome(hello.proof, 0, 0.0))

    with peer(serve) as port:
        assert "does not know the token" in ended(fetch(port))


def test_token_can_change_without_a_restart(server: BlockServer) -> None:
    new = replace(ACCESS, read_tokens=lambda: ("new", "token"))
    assert "not the token" in ended(fetch(server.port, new))
    server._access = replace(ACCESS, read_tokens=lambda: ("new", "token"))
    for access in (new, ACCESS):  # a worker that has not seen the change yet is served too
        made = fetch(server.port, access)
        one_want(server).finish(AllSent())
        assert "0 of 2" in ended(made)


def test_other_compatibility_key_ends_it_first(server: BlockServer) -> None:
    assert "compatibility key" in ended(fetch(server.port, replace(ACCESS, compatibility="other")))


def certificate(folder: Path, name: str) -> TransferAccess:
    """Return an access with a new certificate."""
    cert, key = self_signed(folder, name)
    return replace(ACCESS, cert_file=str(cert), key_file=str(key))


def test_tls_hides_blocks_and_binds_the_proof(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    access, between = certificate(tmp_path, "worker"), certificate(tmp_path, "between")
    server = BlockServer(("127.0.0.1", 0), access, 100, lambda: None)
    made = fetch(server.port, access)
    outgoing = one_want(server)
    for number in (0, 1):
        offer(outgoing, number)
    outgoing.finish(AllSent())
    assert ended(made) == ""
    assert made.wire_bytes == 2 * (SIZE + 5)
    # One who relays everything to the real server, but has another certificate, is noticed.
    context = transfer.TlsCertificate.of_files(between.cert_file, between.key_file)
    assert context is not None
    client = transfer.ssl.SSLContext(transfer.ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname, client.verify_mode = False, transfer.ssl.CERT_NONE

    def relay(connection: socket.socket) -> None:
        front = context.context.wrap_socket(connection, server_side=True)
        back = client.wrap_socket(socket.create_connection(("127.0.0.1", server.port)))
        threading.Thread(target=_pump, args=(front, back), daemon=True).start()
        _pump(back, front)

    with peer(relay) as port:
        assert "not the token" in ended(fetch(port, access))
    monkeypatch.setattr(transfer, "HANDSHAKE_SECONDS", 0.5)
    assert ended(fetch(server.port, ACCESS)) != "", "without TLS nothing is understood"
    assert not server.has_wants
    server.close()


def _pump(source: socket.socket, sink: socket.socket) -> None:
    while data := source.recv(4096):
        sink.sendall(data)


# Peers that a test plays by hand.


def framed(message: msgspec.Struct, payload: bytes = b"") -> bytes:
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(4, "big") + body + payload


def send(connection: socket.socket, message: msgspec.Struct, payload: bytes = b"") -> None:
    connection.sendall(framed(message, payload))


def receive(connection: socket.socket, kind: Any) -> Any:
    length = int.from_bytes(connection.recv(4, socket.MSG_WAITALL), "big")
    return msgspec.msgpack.decode(connection.recv(length, socket.MSG_WAITALL), type=kind)


@contextlib.contextmanager
def peer(serve: Callable[[socket.socket], None]) -> Iterator[int]:
    """Run a server of the test's own, and yield its port. ``serve`` gets the one connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def run() -> None:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                serve(connection)

        threading.Thread(target=run, daemon=True).start()
        yield int(listener.getsockname()[1])


def welcomed(connection: socket.socket) -> Want:
    """Play an honest server up to the want."""
    challenge = Challenge("key", b"n" * 16)
    send(connection, challenge)
    hello = receive(connection, Hello)
    send(connection, Welcome(ACCESS.proof("token", b"server", challenge, hello.nonce, b""), 0, 0.0))
    want: Want = receive(connection, Want)
    return want


BLOCK = Blocks(first=0, digests=DIGESTS[:1], parts=(TARGET_PART,), followed=False)
DATA = b"q" * SIZE


def lie(payload: bytes = DATA, **changed: Any) -> bytes:
    """Return the first block and its data, of which some fields are wrong."""
    return framed(msgspec.structs.replace(BLOCK, **changed), payload)


LIES: dict[str, tuple[bytes, str]] = {
    "digest": (lie(digests=(b"z" * 16,)), "another text"),
    "place": (lie(first=1), "another text"),
    "too-many": (lie(digests=(*DIGESTS, b"c" * 16)), "another text"),
    "none": (lie(digests=()), "another text"),
    "parts": (lie(parts=(TARGET_PART, "draft other")), "another kind"),
    "twice": (lie(parts=(TARGET_PART, TARGET_PART)), "another kind"),
    "no-keys": (lie(parts=("draft d",)), "another kind"),
    "truncated": (lie(DATA[:-1]), "closed the connection"),
    "early-end": (framed(AllSent()), "0 of 2 blocks"),
    "refused": (framed(Refused("full")), "full"),
    "no-message": (framed(Hello(b"", b"")), "ValidationError"),
    "huge": (b"\xff\xff\xff\xff" + b"x" * 1000, "announces a message of 4294967295 bytes"),
}


@pytest.mark.parametrize("name", LIES)
def test_lies_of_a_server_end_the_transfer(name: str) -> None:
    sent, reason = LIES[name]

    def serve(connection: socket.socket) -> None:
        welcomed(connection)
        connection.sendall(sent)
        time.sleep(0.2)

    with peer(serve) as port:
        made = fetch(port)
        assert reason in ended(made)
        assert made.take() is None
        assert not made._budget._held


@pytest.mark.parametrize("after", [0, 1, 2])
def test_server_that_falls_silent_is_given_up(after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SILENCE_SECONDS", "HANDSHAKE_SECONDS", "STALL_SECONDS"):
        monkeypatch.setattr(transfer, name, 0.15)
    left = threading.Event()

    def serve(connection: socket.socket) -> None:
        if after:
            welcomed(connection)
        if after == 2:
            send(connection, BLOCK, b"q" * 10)
        left.wait(5)

    with peer(serve) as port:
        began = time.monotonic()
        assert "too slow, or silent" in ended(fetch(port))
        assert time.monotonic() - began < 2
        left.set()


def test_server_that_only_lives_is_given_up_in_time() -> None:
    def serve(connection: socket.socket) -> None:
        welcomed(connection)
        while True:
            send(connection, StillComputing())
            time.sleep(0.02)

    with peer(serve) as port:
        assert ended(fetch(port, consider=lambda load, latency: 0.2)) != ""


def test_worker_that_stores_slowly_stops_the_reading(server: BlockServer) -> None:
    made = fetch(server.port, most=SIZE + 5)
    outgoing = one_want(server)
    for number in (0, 1):
        offer(outgoing, number)
    outgoing.finish(AllSent())
    first = until(made.take)
    time.sleep(0.1)
    assert made.take() is None
    made.release(first)
    assert until(made.take).blocks.first == 1
    assert ended(made) == ""


def test_blocks_offered_while_the_peer_leaves_are_dropped() -> None:
    budget = ByteBudget(SIZE)
    outgoing = Outgoing(WANT, budget)

    def read() -> Callable[[], list[memoryview]]:
        outgoing.close()  # as the thread that sends does while the engine copies
        return list

    assert outgoing.offer(BLOCK, SIZE, read)
    assert not budget._held
    assert not outgoing._own._held


def test_reader_that_is_slow_is_dropped(server: BlockServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "STALL_SECONDS", 0.2)
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        challenge = receive(connection, Challenge)
        send(connection, Hello(b"c" * 16, ACCESS.proof("token", b"client", challenge, b"c" * 16, b"")))
        receive(connection, Welcome)
        send(connection, msgspec.structs.replace(WANT, seconds=60))
        outgoing = one_want(server)
        data = memoryview(bytearray(1 << 24))
        assert outgoing.offer(BLOCK, len(data), lambda: lambda: [data])
        until(lambda: outgoing.gone)
        until(lambda: not server.budget._held)


STRANGERS: dict[str, bytes] = {
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "huge": b"\xff\xff\xff\xff",
    "larger-than-a-hello": (1025).to_bytes(4, "big") + b"x" * 1025,
    "truncated": b"\0\0\0\x20abc",
    "noise": os.urandom(4096),
    "nothing": b"",
}


@pytest.mark.parametrize("stranger", STRANGERS)
def test_strangers_leave_no_trace(stranger: str, server: BlockServer) -> None:
    for _ in range(MAX_CONNECTIONS + 4):
        # A reset is an end too.
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(STRANGERS[stranger])
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(4096):  # else one that is not accepted yet may take the place of the fetch below
                pass
    until(lambda: server._slots._value == MAX_CONNECTIONS)
    made = fetch(server.port)
    one_want(server).finish(AllSent())
    assert "0 of 2" in ended(made)


def test_connections_are_bounded_and_silent_ones_end(server: BlockServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "HANDSHAKE_SECONDS", 0.3)
    silent = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(MAX_CONNECTIONS)]
    until(lambda: server._slots._value == 0)
    assert ended(fetch(server.port)) != "", "there is no place left"
    until(lambda: server._slots._value == MAX_CONNECTIONS)
    made = fetch(server.port)
    one_want(server).finish(AllSent())
    ended(made)
    for connection in silent:
        connection.close()


def test_no_thread_that_can_be_started_costs_one_transfer(server: BlockServer) -> None:
    """A pod at its process limit cannot start threads. Only the transfer fails: engine and server go on."""

    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        assert ended(fetch(server.port)) == "can't start new thread"
        with socket.create_connection(("127.0.0.1", server.port), timeout=5) as connection:
            assert connection.recv(1) == b""
    assert server._slots._value == MAX_CONNECTIONS
    made = fetch(server.port)
    one_want(server).finish(AllSent())
    assert "0 of 2" in ended(made)


def test_want_larger_than_a_prompt_is_not_read(server: BlockServer) -> None:
    assert ended(fetch(server.port, want=msgspec.structs.replace(WANT, tokens=bytes(100_000)))) != ""
    assert not server.has_wants


def test_notify_when_a_want_arrives_or_leaves() -> None:
    told = threading.Event()
    server = BlockServer(("127.0.0.1", 0), ACCESS, 100, told.set)
    made = fetch(server.port)
    assert told.wait(5)
    outgoing = one_want(server)
    told.clear()
    made.close()
    assert told.wait(5)
    until(lambda: outgoing.gone and made.ended)
    server.close()
