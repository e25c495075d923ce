"""Choice for steps that mix decoding rows with prompt chunks: a graph and a pass of the chunks, or one eager pass.

The graph saves the host the eager calls of the decoding rows, but the weights are read twice. One eager pass reads them
once, but the device waits wherever the host queues calls more slowly than it runs them. The estimates here are those of
docs/gpu.md.
"""

from __future__ import annotations

HOST_SECONDS_OF_LAYER = 0.1e-3
"""Host time to queue a layer of the target eagerly: nine launches of about 10 us."""
HOST_SECONDS_OF_DRAFT_PASS = 0.6e-3
"""Host time to queue a draft pass eagerly: one layer, its logits, proposals and tables."""
HOST_SECONDS_OF_STEP = 2e-3
"""Host time to queue the rest of an eager step: packing, sampling, acceptance and commit."""
TOKENS_OF_ONE_READ = 150
"""Number of tokens whose matrix products take as long as one read of the weights; more take longer. From the rates of
an H200; other GPUs lie between 110 and 300."""


def is_replay_faster(
    graph_seconds: float, verify_seconds: float, chunk_tokens: int, *, layers: int, passes: int
) -> bool:
    """Return whether a graph and a pass of the prompt chunks take less time than one eager pass of all rows.

    Args:
        graph_seconds: Time of the graph, measured at its capture.
        verify_seconds: Part of it that is not drafting. A pass of the target over few tokens takes as long.
        chunk_tokens: Tokens of the chunks.
        layers: Layers of the target.
        passes: Draft passes of the graph, which an eager step would queue one by one.
    """
    replayed = graph_seconds + verify_seconds * max(1.0, chunk_tokens / TOKENS_OF_ONE_READ)
    eager = HOST_SECONDS_OF_STEP + layers * HOST_SECONDS_OF_LAYER + passes * HOST_SECONDS_OF_DRAFT_PASS
    return replayed < eager
