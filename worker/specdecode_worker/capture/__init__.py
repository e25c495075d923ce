"""Capture of served requests: records in segment files, written by a background thread and read by ``distill``.

server ──enqueue──> Recorder: bounded queue ──thread──> redaction ──> LiveStore ──> DIR/*.segment ──> read_records
                                                                      `sweep` and `delete_records` delete from there

The rules of the `Recorder` come from the worker's configuration, or from the plan, which switches it on and off.
"""

from specdecode_worker.capture.recorder import Recorder
from specdecode_worker.capture.records import CaptureCounts, CaptureError, Dropped, Record, opening_hash
from specdecode_worker.capture.segments import ReadStats, read_records
