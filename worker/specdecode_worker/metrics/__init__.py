"""/metrics: the engine's report in Prometheus' words, so that the two cannot disagree.

A report holds no speculation by task and no request of its own; the server counts those from the tokens that pass
through it, and ``other`` takes the rest of the report's totals (steps whose tokens nobody waited for).
"""

from specdecode_worker.metrics.exposition import CONTENT_TYPE, render
from specdecode_worker.metrics.server_counters import Counts, Observer

__all__ = ["CONTENT_TYPE", "Counts", "Observer", "render"]
