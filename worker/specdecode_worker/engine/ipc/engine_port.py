"""Engine's end of the sockets between the server and the engine process."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import msgspec
import zmq

from specdecode_worker.engine.ipc.messages import FromEngine, ToEngine


class EnginePort:
    """Engine's end of the socket pair.

    Every wire message is a msgpack list of messages, so that all tokens of a step travel together.
    """

    def __init__(self, address: str) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
        # No high-water mark: tokens are never dropped, and a slow reader never blocks a step. The number of requests in
        # flight bounds the queue.
        self._socket.set_hwm(0)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.connect(address)
        self._decoder = msgspec.msgpack.Decoder(list[ToEngine])
        self._encoder = msgspec.msgpack.Encoder()

    def receive(self, timeout_seconds: float) -> list[ToEngine]:
        """Return all pending messages.

        Args:
            timeout_seconds: Maximum time to wait for the first message, in seconds.

        Returns:
            The messages, which may be none.
        """
        self._socket.poll(int(1000 * timeout_seconds))
        messages: list[ToEngine] = []
        with contextlib.suppress(zmq.Again):
            while True:
                messages += self._decoder.decode(self._socket.recv(zmq.NOBLOCK))
        return messages

    def send(self, messages: Sequence[FromEngine]) -> None:
        """Send the messages as one wire message; do nothing if there are none."""
        if messages:
            self._socket.send(self._encoder.encode(messages))

    def close(self) -> None:
        """Close the socket; unsent messages have one second to leave."""
        self._socket.close()

    def flush_and_close(self) -> None:
        """Close the socket and wait until the messages have left, for at most one second."""
        self.close()
        zmq.Context.instance().term()
