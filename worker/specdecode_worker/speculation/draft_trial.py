"""Schedule of a draft trial: which draft runs in which block, and the pairs that are finished."""

from __future__ import annotations

from collections import deque

from specdecode_worker.contract import DraftTrial, TrialPair, candidate_first
from specdecode_worker.speculation.trial_costs import BlockCells, BlockCosts, pair_of

MAX_PAIRS = 16
"""Most finished pairs in the report. The operator reads reports far more often than pairs finish."""
MAX_PAIRS_BYTES = 16 * 1024
"""Most bytes of the finished pairs in the report, a quarter of it. The newest pair is reported in any case."""


class TrialSchedule:
    """Position in a trial. Each pair has two blocks, one for each draft, in the order that `candidate_first` says."""

    def __init__(self, trial: DraftTrial) -> None:
        self.trial = trial
        """The trial. It may be replaced between two blocks by one with the same id and candidate."""
        self.pair = trial.first_pair
        """Index of the pair that runs."""
        self._first_block: BlockCells | None = None
        self._pairs: deque[TrialPair] = deque(maxlen=MAX_PAIRS)

    @property
    def is_between_pairs(self) -> bool:
        """True before the first block of a pair."""
        return self._first_block is None

    @property
    def is_candidates_turn(self) -> bool:
        """True if the next or running block belongs to the candidate."""
        return candidate_first(self.trial.id, self.pair) == self.is_between_pairs

    @property
    def pairs(self) -> tuple[TrialPair, ...]:
        """Newest finished pairs that fit into the report, oldest first."""
        newest: deque[TrialPair] = deque()
        left = MAX_PAIRS_BYTES
        for pair in reversed(self._pairs):
            left -= len(pair.model_dump_json())
            if newest and left < 0:
                break
            newest.appendleft(pair)
        return tuple(newest)

    def new_block(self) -> BlockCosts:
        """Return an empty accumulator for the block that begins."""
        return BlockCosts(self.trial.block_requests)

    def end_block(self, block: BlockCosts) -> None:
        """Record the costs of the finished block and go on to the next one."""
        if self._first_block is None:
            self._first_block = block.cells
            return
        blocks = (self._first_block, block.cells)
        incumbent, candidate = reversed(blocks) if candidate_first(self.trial.id, self.pair) else blocks
        self._pairs.append(pair_of(self.pair, incumbent, candidate))
        self._first_block = None
        self.pair = max(self.pair + 1, self.trial.first_pair)
