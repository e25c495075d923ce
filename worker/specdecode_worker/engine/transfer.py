"""Transfer of cache blocks between the engines of two workers: one TCP connection for each request, and no torch.

The peer of a worker is a remote prefix cache. It is asked for the blocks of a prompt: a prefill worker computes them
and sends each as soon as it is computed, and a worker that a stream has left sends those that it still holds. A block
that arrives is stored under its digest like one that was computed here. The request is then an ordinary prefix hit and
computes its last block itself, so that nothing else is handed over: no sampling, no grammar, no position. Whatever
goes wrong on the way costs time and no request, because the rest of the prompt is computed here.

    worker                                       peer
    -------- connect; TLS if the workers have a certificate --------
                                   <-  Challenge    its compatibility key first: a worker with another one leaves
    Hello                           ->              proof of the deployment's token
                                   <-  Welcome      its own proof, and its load; a worker may leave by it
    Want                            ->              prompt, salt, task, and what a block consists of
                                   <-  Blocks       digests, and what there is of these blocks; the bytes follow
                                   <-  StillComputing every ALIVE_SECONDS without blocks
                                   <-  AllSent      the last block has left
              or at any time       <-  Refused      reason: token, busy, another draft

A message is four bytes with its length (unsigned, big-endian) and a msgspec struct as msgpack. The bytes of blocks
follow their ``Blocks`` message part by part, each part with all blocks of the message. A part is the keys and values of
the target, those of the request's draft, or the target's states that drafts read. A draft without a cache is a part of
zero bytes: parts are marks too.

*Token.* Neither side sends it. Both prove that they know it by an HMAC over the nonces of both, and over the
certificate of the peer, so that nobody between them can relay a proof. So certificates need no names and no authority.

*Sizes.* No peer names a size that is trusted: messages are bounded before they are read, and the number of bytes of a
block is what this engine's own caches have. A worker takes digests only in the order of its own prompt.

*Bounds.* MAX_IN_FLIGHT_BYTES of blocks wait in each process, on either side, so that a slow reader stops the export and
not a step. There are at most MAX_CONNECTIONS of each. A peer that is silent for SILENCE_SECONDS, or takes longer than
STALL_SECONDS for SLICE_BYTES, is given up; a worker that closes its connection, or dies, withdraws its want.

Another transport, such as NIXL, replaces `BlockServer` and `BlockFetch`: what the engine sees of them are wants, and
blocks with digests and parts.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import queue
import secrets
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from specdecode_worker.http_edge import TlsCertificate, listen

log = logging.getLogger(__name__)

TARGET_PART = "target"
"""Part of a block that every block has: keys and values of the target."""
MAX_IN_FLIGHT_BYTES = 64 * 1024 * 1024
"""Bytes of blocks that wait in a process to be sent, and to be stored: each 64 MiB, or one block that is larger."""
MAX_FRAME_BYTES = 8 * 1024 * 1024
"""Bytes of the blocks of one message, or one block that is larger."""
MAX_CONNECTIONS = 32
"""Most connections that a server has, and most requests that wait for blocks."""
CONNECT_SECONDS = 1.0
HANDSHAKE_SECONDS = 2.0
"""Time for everything before the first block message, on either side."""
ALIVE_SECONDS = 0.25
SILENCE_SECONDS = 2.0
STALL_SECONDS = 5.0
SLICE_BYTES = 256 * 1024
_SHORT_BYTES = 1024
"""Largest message of a peer that has not proved that it knows the token."""
_ANSWER_BYTES = 256 * 1024
"""Largest message of a server: digests of a frame of the smallest blocks."""
_WANT_BYTES = 64 * 1024
"""Largest want, in addition to its prompt: salt, task and parts."""
_NONCE_BYTES = 16
_MOST_SECONDS = 600.0
_LENGTH = struct.Struct(">I")


class TransferFailed(Exception):
    """Blocks cannot be sent or received; the message gives the reason. The request goes on without them."""


class Challenge(msgspec.Struct, frozen=True, tag=True):
    """First message of the server."""

    compatibility: str
    nonce: bytes


class Hello(msgspec.Struct, frozen=True, tag=True):
    """First message of the client."""

    nonce: bytes
    proof: bytes


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """Proof of the server, and its load."""

    proof: bytes
    queued_tokens: int
    """Prompt tokens that it has to compute before those of a new request."""
    token_seconds: float
    """Measured time for one prompt token; 0 if it is not known."""


class Want(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Blocks that a worker asks for: those of ``tokens`` from block ``first`` on, without the one of the last token."""

    tokens: bytes
    """Token ids, four bytes each, little-endian."""
    salt: str
    task: str
    parts: dict[str, int]
    """Bytes of each part of a block, by name. The server must have the same, or it refuses."""
    first: int
    compute: bool
    """False asks for blocks that the server has already, and for no computation."""
    seconds: float
    """Time after which nobody waits for the blocks any more."""


class Blocks(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Consecutive blocks from number ``first`` of the prompt on, with the same ``parts``, whose bytes follow."""

    first: int
    digests: tuple[bytes, ...]
    parts: tuple[str, ...]
    followed: bool
    """True if some draft has processed the blocks."""


class StillComputing(msgspec.Struct, frozen=True, tag=True):
    """Sign of life of a server that computes or has other work."""


class AllSent(msgspec.Struct, frozen=True, tag=True):
    """Last message of a server that has sent what it has."""


class Refused(msgspec.Struct, frozen=True, tag=True):
    """Last message of a server that serves no blocks to this request; the reason is for people."""

    reason: str


@dataclass(frozen=True, slots=True)
class TransferAccess:
    """Compatibility key, tokens and certificate, which all workers of a deployment share."""

    compatibility: str
    """Digest of everything that the bytes of a block depend on."""
    read_tokens: Callable[[], Sequence[str]]
    """Function that returns the deployment's tokens, the current one first. It is called for every connection."""
    cert_file: str | None = None
    key_file: str | None = None

    def proof(self, token: str, of: bytes, challenge: Challenge, hello_nonce: bytes, certificate: bytes) -> bytes:
        """Return the proof of one side (``of``) that it knows a token."""
        key = hmac.digest(token.encode(), b"specdecode transfer of blocks", hashlib.sha256)
        bound = hashlib.sha256(certificate).digest()
        return hmac.digest(key, of + challenge.nonce + hello_nonce + bound, hashlib.sha256)


class ByteBudget:
    """Bytes of blocks in this process, which threads wait for. One block may exceed the bound if it is alone."""

    def __init__(self, most: int) -> None:
        self._most, self._held = most, 0
        self._freed = threading.Condition()

    def take(self, count: int, seconds: float) -> bool:
        """Add bytes once there is room for them, or nothing else is held. Return False if that takes too long."""
        with self._freed:
            fits = self._freed.wait_for(lambda: not self._held or self._held + count <= self._most, seconds)
            self._held += count if fits else 0
            return fits

    def release(self, count: int) -> None:
        """Remove bytes."""
        with self._freed:
            self._held -= count
            self._freed.notify_all()


class _Channel:
    """Socket with messages. Every operation has a deadline."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection

    def send(self, message: msgspec.Struct, payload: Sequence[memoryview] = ()) -> None:
        body = msgspec.msgpack.encode(message)
        self._socket.settimeout(STALL_SECONDS)
        self._socket.sendall(_LENGTH.pack(len(body)) + body)
        for view in payload:
            for start in range(0, len(view), SLICE_BYTES):
                self._socket.sendall(view[start : start + SLICE_BYTES])

    def receive(self, kind: Any, most_bytes: int, deadline: float) -> Any:
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size, deadline))
        if length > most_bytes:
            raise TransferFailed(f"the peer announces a message of {length} bytes; at most {most_bytes} are read")
        return msgspec.msgpack.decode(self._exactly(length, deadline), type=kind)

    def fill(self, view: memoryview, deadline: float) -> None:
        """Read the bytes of blocks. Each SLICE_BYTES have STALL_SECONDS."""
        for start in range(0, len(view), SLICE_BYTES):
            self._fill(view[start : start + SLICE_BYTES], min(time.monotonic() + STALL_SECONDS, deadline))

    def _exactly(self, count: int, deadline: float) -> bytes:
        data = bytearray(count)
        self._fill(memoryview(data), deadline)
        return bytes(data)

    def _fill(self, view: memoryview, deadline: float) -> None:
        while view:
            self._socket.settimeout(max(deadline - time.monotonic(), 0.001))
            count = self._socket.recv_into(view)
            if not count:
                raise TransferFailed("the peer has closed the connection")
            view = view[count:]


@contextlib.contextmanager
def _failures() -> Iterator[None]:
    """Translate the errors of sockets and messages into TransferFailed."""
    try:
        yield
    except TimeoutError:
        raise TransferFailed("the peer is too slow, or silent") from None
    except (OSError, msgspec.MsgspecError, ValueError) as error:
        raise TransferFailed(f"{type(error).__name__}: {error}") from None


class Outgoing:
    """A want that this engine serves, and the blocks that are on their way. The engine offers, a thread sends."""

    def __init__(self, want: Want, budget: ByteBudget) -> None:
        self.want = want
        self.gone = False
        """True once nobody waits for the blocks: the peer has left, or is too slow. It may become so during `offer`."""
        self._budget, self._own = budget, ByteBudget(MAX_IN_FLIGHT_BYTES // 4)  # one slow reader leaves room to others
        self._items: queue.SimpleQueue[tuple[Blocks | AllSent | Refused, int, Callable[[], Sequence[memoryview]]]] = (
            queue.SimpleQueue()
        )

    def offer(self, blocks: Blocks, count: int, read: Callable[[], Callable[[], Sequence[memoryview]]]) -> bool:
        """Queue blocks. Return False if too many bytes are on their way already.

        Args:
            blocks: Description of the blocks.
            count: Number of their bytes.
            read: Function that begins to copy the bytes. It returns one that waits for them, which a thread calls.
        """
        if not self._own.take(count, 0):
            return False
        if not self._budget.take(count, 0):
            self._own.release(count)
            return False
        self._items.put((blocks, count, read()))
        if self.gone:  # `close` may have emptied the queue before
            self.close()
        return True

    def finish(self, message: AllSent | Refused) -> None:
        """Queue the last message."""
        self._items.put((message, 0, tuple))

    def send_all(self, channel: _Channel) -> None:
        """Send what is offered until the last message."""
        deadline = time.monotonic() + min(self.want.seconds, _MOST_SECONDS)
        while True:
            try:
                message, count, read = self._items.get(timeout=ALIVE_SECONDS)
            except queue.Empty:
                message, count, read = StillComputing(), 0, tuple  # type: ignore[assignment]
            try:
                if time.monotonic() > deadline:
                    raise TransferFailed("nobody waits for the blocks any more")
                channel.send(message, read())
            finally:
                self._release(count)
            if isinstance(message, AllSent | Refused):
                return

    def close(self) -> None:
        """Drop what was not sent."""
        self.gone = True
        with contextlib.suppress(queue.Empty):
            while True:
                self._release(self._items.get_nowait()[1])

    def _release(self, count: int) -> None:
        self._budget.release(count)
        self._own.release(count)


class BlockServer:
    """Listening socket of an engine that sends blocks to other engines of its deployment."""

    def __init__(
        self, address: tuple[str, int], access: TransferAccess, most_tokens: int, notify: Callable[[], None]
    ) -> None:
        """Listen.

        Args:
            address: Host and port; port 0 takes a free one.
            access: What the workers of the deployment have in common.
            most_tokens: Longest prompt.
            notify: Function to call, from a thread, when a want has arrived.

        Raises:
            OSError: The address cannot be listened on.
        """
        self.budget = ByteBudget(MAX_IN_FLIGHT_BYTES)
        self.load = (0, 0.0)
        """``queued_tokens`` and ``token_seconds`` of the next Welcome, set by the engine."""
        self._access, self._notify = access, notify
        self._most_bytes = _WANT_BYTES + 4 * most_tokens
        self._certificate = TlsCertificate.of_files(access.cert_file, access.key_file)
        self._wants: queue.SimpleQueue[Outgoing] = queue.SimpleQueue()
        self._slots = threading.Semaphore(MAX_CONNECTIONS)
        self._listener = listen(*address, backlog=MAX_CONNECTIONS)
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, name="blocks", daemon=True).start()

    @property
    def has_wants(self) -> bool:
        """True if `take_wants` returns some."""
        return not self._wants.empty()

    def take_wants(self) -> list[Outgoing]:
        """Return the wants that have arrived since the last call."""
        taken = []
        with contextlib.suppress(queue.Empty):
            while True:
                taken.append(self._wants.get_nowait())
        return taken

    def close(self) -> None:
        """Stop listening. Connections end with the process."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # which ends a wait in `accept`, as `close` does not
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                if self._listener.fileno() < 0:
                    return
                time.sleep(ALIVE_SECONDS)  # out of file descriptors, for example
                continue
            if not self._slots.acquire(blocking=False):
                connection.close()
                continue
            try:
                threading.Thread(target=self._serve, args=(connection,), name="blocks", daemon=True).start()
            except RuntimeError as error:  # the system has no thread left
                log.warning("a worker gets no blocks: %s", error)
                self._slots.release()
                connection.close()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection, _failures(), self._secure(connection) as secured:
                channel = _Channel(secured)
                outgoing = Outgoing(self._agree(channel), self.budget)
                self._wants.put(outgoing)
                self._notify()
                try:
                    outgoing.send_all(channel)
                finally:
                    outgoing.close()
                    self._notify()
        except TransferFailed as error:
            log.info("blocks for another worker: %s", error)
        finally:
            self._slots.release()

    def _secure(self, connection: socket.socket) -> socket.socket:
        _tune(connection)
        connection.settimeout(HANDSHAKE_SECONDS)
        if self._certificate is None:
            return connection
        self._certificate.refresh()
        return self._certificate.context.wrap_socket(connection, server_side=True)

    def _agree(self, channel: _Channel) -> Want:
        """Check the token of a client and return its want."""
        deadline = time.monotonic() + HANDSHAKE_SECONDS
        challenge = Challenge(self._access.compatibility, secrets.token_bytes(_NONCE_BYTES))
        channel.send(challenge)
        hello: Hello = channel.receive(Hello, _SHORT_BYTES, deadline)
        certificate = _leaf(self._access.cert_file)
        for token in self._access.read_tokens():
            expected = self._access.proof(token, b"client", challenge, hello.nonce, certificate)
            if hmac.compare_digest(expected, hello.proof):
                break
        else:
            channel.send(Refused("this is not the token of the deployment"))
            raise TransferFailed("a peer does not know the token of the deployment")
        proof = self._access.proof(token, b"server", challenge, hello.nonce, certificate)
        channel.send(Welcome(proof, *self.load))
        want: Want = channel.receive(Want, self._most_bytes, deadline)
        if len(want.tokens) % 4:
            raise TransferFailed("a peer wants blocks of no text")
        return want


@dataclass(frozen=True, slots=True)
class ArrivedBlocks:
    """Blocks that have arrived. ``payload`` is the object of ``allocate``."""

    blocks: Blocks
    payload: Any
    nbytes: int


class BlockFetch:
    """Blocks of one request on their way to this engine. A thread receives them, the engine takes them."""

    def __init__(
        self,
        address: str,
        access: TransferAccess,
        want: Want,
        digests: Sequence[bytes],
        *,
        budget: ByteBudget,
        allocate: Callable[[int], tuple[Any, memoryview]],
        consider: Callable[[Welcome, float], float],
        notify: Callable[[], None],
    ) -> None:
        """Ask for blocks.

        Args:
            address: Host and port of the peer.
            access: What the workers of the deployment have in common.
            want: What to ask for.
            digests: Digests of the wanted blocks, in order; a block with another one is refused.
            budget: Bytes of all fetches.
            allocate: Function that returns memory for so many bytes, and its view.
            consider: Function of the peer's load and the seconds until it was known, called in the thread. It returns
                how many seconds the blocks may take; 0 if they are not worth it.
            notify: Function to call when blocks have arrived, or the last has.
        """
        self.ended = False
        self.problem = ""
        """Reason why blocks are missing; empty if all have arrived, or if they are not worth it."""
        self.declined = False
        """True if ``consider`` returned 0."""
        self.wire_seconds = 0.0
        """Time in which the bytes of blocks arrived; `wire_bytes` is their number."""
        self.wire_bytes = 0
        self._address, self._access, self.want, self._digests = address, access, want, tuple(digests)
        self._budget, self._allocate, self._consider, self._notify = budget, allocate, consider, notify
        self._arrived: queue.SimpleQueue[ArrivedBlocks] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False
        self._connection: socket.socket | None = None
        try:
            threading.Thread(target=self._run, name="fetch", daemon=True).start()
        except RuntimeError as error:  # the system has no thread left
            self.ended, self.problem = True, str(error)

    def take(self) -> ArrivedBlocks | None:
        """Return the next blocks that have arrived. They count in the budget until `release`."""
        try:
            return self._arrived.get_nowait()
        except queue.Empty:
            return None

    def release(self, arrived: ArrivedBlocks) -> None:
        """Remove blocks that were stored from the budget."""
        self._budget.release(arrived.nbytes)

    def close(self) -> None:
        """Withdraw the want and drop what has arrived."""
        with self._lock:
            self._closed = True
            if self._connection is not None:
                with contextlib.suppress(OSError):
                    self._connection.shutdown(socket.SHUT_RDWR)
        while (arrived := self.take()) is not None:
            self.release(arrived)

    def _run(self) -> None:
        try:
            with _failures(), self._connect() as connection:
                with self._lock:
                    if self._closed:
                        return
                    self._connection = connection
                began = time.monotonic()
                channel = _Channel(connection)
                deadline = self._agree(channel, began)
                if deadline:
                    self._receive(channel, deadline)
        except TransferFailed as error:
            self.problem = str(error)
        finally:
            self.ended = True
            self._notify()

    def _connect(self) -> socket.socket:
        host, _, port = self._address.rpartition(":")
        connection = socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS)
        _tune(connection)
        connection.settimeout(HANDSHAKE_SECONDS)
        if self._access.cert_file is None:
            return connection
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        # Pods have no names in certificates. The proof of the peer covers its certificate instead.
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        try:
            return context.wrap_socket(connection)
        except BaseException:
            connection.close()
            raise

    def _agree(self, channel: _Channel, began: float) -> float:
        """Exchange proofs and send the want. Return the time until which to wait for blocks, 0 not to."""
        access, deadline = self._access, began + HANDSHAKE_SECONDS
        challenge: Challenge = channel.receive(Challenge, _SHORT_BYTES, deadline)
        if challenge.compatibility != access.compatibility:
            raise TransferFailed("the peer has another compatibility key")
        certificate = b""
        if isinstance(self._connection, ssl.SSLSocket):
            certificate = self._connection.getpeercert(binary_form=True) or b""
        token, nonce = access.read_tokens()[0], secrets.token_bytes(_NONCE_BYTES)
        channel.send(Hello(nonce, access.proof(token, b"client", challenge, nonce, certificate)))
        answer: Welcome | Refused = channel.receive(Welcome | Refused, _SHORT_BYTES, deadline)
        if isinstance(answer, Refused):
            raise TransferFailed(f"refused: {answer.reason}")
        if not hmac.compare_digest(answer.proof, access.proof(token, b"server", challenge, nonce, certificate)):
            raise TransferFailed("the peer does not know the token of the deployment")
        seconds = self._consider(answer, time.monotonic() - began)
        self.declined = not seconds
        if self.declined:
            return 0.0
        channel.send(msgspec.structs.replace(self.want, seconds=seconds))
        return time.monotonic() + seconds

    def _receive(self, channel: _Channel, deadline: float) -> None:
        following = 0
        while not self._closed:
            now = time.monotonic()
            message: Blocks | StillComputing | AllSent | Refused = channel.receive(
                Blocks | StillComputing | AllSent | Refused, _ANSWER_BYTES, min(now + SILENCE_SECONDS, deadline)
            )
            if isinstance(message, Refused):
                raise TransferFailed(f"refused: {message.reason}")
            if isinstance(message, AllSent):
                if following < len(self._digests) and self.want.compute:
                    raise TransferFailed(f"the peer has {following} of {len(self._digests)} blocks")
                return
            if time.monotonic() > deadline:
                raise TransferFailed("the blocks take too long")
            if isinstance(message, Blocks):
                self._store(channel, message, following, deadline)
                following += len(message.digests)

    def _store(self, channel: _Channel, blocks: Blocks, following: int, deadline: float) -> None:
        """Receive the bytes of blocks, whose description comes from a peer."""
        count, parts = len(blocks.digests), self.want.parts
        expected = self._digests[following : following + count]
        if not count or blocks.first != self.want.first + following or blocks.digests != expected:
            raise TransferFailed("the peer sends blocks of another text")
        is_known = len(set(blocks.parts)) == len(blocks.parts) and parts.keys() >= set(blocks.parts)
        if not is_known or TARGET_PART not in blocks.parts:
            raise TransferFailed("the peer sends blocks of another kind")
        nbytes = count * sum(parts[name] for name in blocks.parts)
        if nbytes > MAX_FRAME_BYTES and count > 1:
            raise TransferFailed(f"the peer sends {nbytes} bytes at once")
        if not self._budget.take(nbytes, max(deadline - time.monotonic(), 0)):
            raise TransferFailed("this engine has no room for more blocks")
        arrived = None
        try:
            payload, view = self._allocate(nbytes)
            began = time.monotonic()
            channel.fill(view, deadline)
            self.wire_seconds += time.monotonic() - began
            self.wire_bytes += nbytes
            arrived = ArrivedBlocks(blocks, payload, nbytes)
        finally:
            if arrived is None:
                self._budget.release(nbytes)
        with self._lock:  # `close` has emptied the queue, or will
            if self._closed:
                self._budget.release(nbytes)
            else:
                self._arrived.put(arrived)
        self._notify()


def _tune(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def _leaf(cert_file: str | None) -> bytes:
    """Return the server's certificate, the first of its chain; empty without TLS."""
    if cert_file is None:
        return b""
    text = Path(cert_file).read_text()
    start, end = text.index(ssl.PEM_HEADER), text.index(ssl.PEM_FOOTER)
    return ssl.PEM_cert_to_DER_cert(text[start : end + len(ssl.PEM_FOOTER)])
