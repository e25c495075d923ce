"""Threads and store of the recorder, whose rules may change while the worker serves.

event loop ──rules, records──> Recorder ──> RecordWriter (thread: hook, encoding) ──> LiveStore ──> DIR/*.segment
                                    └── control thread: applies rules, deletes, sweeps, replaces stuck writers
"""
