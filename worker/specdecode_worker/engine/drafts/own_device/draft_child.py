"""Main function of a draft process: load the draft, then answer messages until the worker closes the pipe."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection

import msgspec

from specdecode_worker.contract import DraftState
from specdecode_worker.engine.drafts.draft_problem import describe_failure
from specdecode_worker.engine.drafts.own_device.draft_messages import Done, Failed, Ready, ToDraft
from specdecode_worker.engine.drafts.own_device.draft_server import DraftServer
from specdecode_worker.engine.drafts.own_device.tensor_region import TensorRegion


@dataclass(frozen=True, slots=True)
class BuiltDraft:
    """Draft that was loaded in this process."""

    server: DraftServer
    state: DraftState


BuildDraft = Callable[[], BuiltDraft]
"""Picklable loader of a draft. It raises ModelError if the draft cannot be loaded."""


def main(build: BuildDraft, messages: TensorRegion, answers: TensorRegion, pipe: Connection) -> None:
    """Run the draft process. Exit with 0 when the worker closes the pipe, with 1 after a Failed message."""
    encoder = msgspec.msgpack.Encoder()
    try:
        built = build()
        drafter, decoder = built.server.drafter, msgspec.msgpack.Decoder(ToDraft)
        ready = Ready(
            state_json=built.state.model_dump_json().encode(),
            layers=drafter.reads.layers,
            final=drafter.reads.final,
            last_position=drafter.last_position,
        )
        pipe.send_bytes(encoder.encode(ready))
        while True:
            message = decoder.decode(pipe.recv_bytes())
            shapes = answers.put(built.server.run(message, messages.get(message.tensors)))
            pipe.send_bytes(encoder.encode(Done(shapes)))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        os._exit(0)  # the worker is gone
    except BaseException as error:  # a panic of a Rust library is not an Exception
        traceback.print_exc()
        pipe.send_bytes(encoder.encode(Failed(_reason(error))))
        os._exit(1)


def _reason(error: BaseException) -> str:
    try:
        return describe_failure(error, "the draft")
    except BaseException:
        return f"{type(error).__name__}: {error}"  # the device of this process does not work any more
