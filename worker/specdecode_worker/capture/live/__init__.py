"""Capture that the plan switches on and off: into a folder of one worker, without a restart and without stalls.

event loop ──rules, records──> LiveRecorder ──> RecordWriter (thread: hook, encoding) ──> LiveStore ──> DIR/*.segment
                                    └── control thread: applies rules, deletes, sweeps, replaces stuck writers
"""

from specdecode_worker.capture.live.live_recorder import LiveRecorder

__all__ = ["LiveRecorder"]
