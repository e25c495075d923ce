"""Prometheus metrics of the worker, derived from the engine's report so that both agree.

The report has neither speculation counts per task nor figures of single requests. The server counts them from the
tokens that it streams. The task ``other`` gets the remainder of the report's totals: for example the steps of
aborted requests, of which the server receives no tokens.
"""

from specdecode_worker.metrics.exposition import CONTENT_TYPE, render
from specdecode_worker.metrics.server_counters import RequestCounter, ServerCounters

__all__ = ["CONTENT_TYPE", "RequestCounter", "ServerCounters", "render"]
