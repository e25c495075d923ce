"""Log-probabilities of the tokens that a captured step emits, in static tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdecode_kernels.transfer import to_device
from specdecode_worker.engine.batch import Row
from specdecode_worker.engine.graphs.graph_key import GraphKey
from specdecode_worker.engine.step.host_copy import to_host
from specdecode_worker.engine.step.logprobs import LEAST_TOP, ROWS_AT_ONCE, RowLogprobs, TokenLogprobs, logprobs_of


class LogprobOutputs:
    """Outputs of a step of D accepted tokens at most: rank and top tokens, and their log-probabilities."""

    def __init__(self, key: GraphKey, vocab_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self._columns, self._rows = key.depth + 1, key.rows
        self._top = min(LEAST_TOP, vocab_size)
        count = key.rows * self._columns
        self.ints_TK = torch.zeros(count, 2 + self._top, dtype=torch.int64, device=device)
        self.floats_TK = torch.zeros(
            count, 1 + self._top, dtype=torch.promote_types(dtype, torch.float32), device=device
        )

    def write(self, logits_TV: Tensor, query_start: Tensor, out: Tensor) -> None:
        """Write the log-probabilities of the accepted path of every row and of the token behind it.

        Args:
            logits_TV: The target's logits of all packed rows.
            query_start: First packed row of each sequence, [B + 1].
            out: Result of the step, as `Committed.out`.
        """
        depth = self._columns - 1
        nodes_BD = torch.nn.functional.pad(out[:, depth + 1 : 2 * depth + 1].clamp(min=0), (1, 0))
        rows_T = (query_start[:-1, None] + nodes_BD).flatten().clamp(max=len(logits_TV) - 1)
        tokens_T = out[:, : depth + 1].flatten().clamp(min=0)
        for start in range(0, len(rows_T), ROWS_AT_ONCE):
            here = slice(start, start + ROWS_AT_ONCE)
            logprob_T, rank_T, best_TK, logprobs_TK = logprobs_of(logits_TV[rows_T[here]], tokens_T[here], self._top)
            self.ints_TK[here].copy_(torch.cat((tokens_T[here, None], rank_T[:, None], best_TK), dim=1))
            self.floats_TK[here].copy_(torch.cat((logprob_T[:, None], logprobs_TK), dim=1))

    def queue_read(self, rows: Sequence[Row]) -> RowLogprobs | None:
        """Queue the copy of the rows that asked for log-probabilities to the host; None if none did."""
        tops = {b: top for b, row in enumerate(rows) if (top := row.request.submit.sampling.logprobs) is not None}
        if not tops:
            return None
        asked_A = to_device(list(tops), self.ints_TK.device)
        ints, floats = (
            table_TK.view(self._rows, self._columns, -1)[asked_A].flatten(0, 1)
            for table_TK in (self.ints_TK, self.floats_TK)
        )
        (ints, floats), host_copy = to_host((ints, floats))
        logprobs = TokenLogprobs(ints[:, 0], floats[:, 0], ints[:, 1], ints[:, 2:], floats[:, 1:], host_copy)
        return RowLogprobs(tuple(tops), tuple(tops.values()), (self._columns,) * len(tops), logprobs)
