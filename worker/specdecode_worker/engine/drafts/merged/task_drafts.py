"""Drafts of each task: the one that it names, and those that are merged with it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from specdecode_worker.contract import MergedDraft, TaskMatch

Known = Callable[[str], bool]
"""Function that returns whether a draft of this name can run."""


class TaskDrafts:
    """Choice of drafts by task. Without tasks all requests use the default draft, and nothing is merged."""

    def __init__(self, default: str, known: Known, mergeable: Known, *, merges: bool = True) -> None:
        """Start without tasks.

        Args:
            default: Name of the draft of tasks without one.
            known: Whether a draft can run; names of others are ignored.
            mergeable: Whether a draft that can run can propose behind tokens of other drafts.
            merges: False if the sampler cannot merge drafts. Each task then uses its own draft alone.
        """
        self._default, self._known, self._mergeable, self._can_merge = default, known, mergeable, merges
        self._by_task: dict[str, TaskMatch] = {}
        self.merges = False
        """True if some task merges drafts."""

    def set_tasks(self, tasks: Iterable[TaskMatch]) -> None:
        """Replace all tasks."""
        self._by_task = {task.name: task for task in tasks if task.draft or task.merge}
        self.merges = self._can_merge and any(task.merge for task in self._by_task.values())

    @property
    def is_empty(self) -> bool:
        """True if no task has drafts of its own."""
        return not self._by_task

    @property
    def merging(self) -> Sequence[str]:
        """Names of the tasks that merge drafts."""
        return [name for name, task in self._by_task.items() if task.merge]

    def name(self, task: str) -> str:
        """Return the name of the draft of a task: the default one if it names none, or one that cannot run."""
        match = self._by_task.get(task) if self._by_task else None
        return match.draft if match is not None and match.draft and self._known(match.draft) else self._default

    def merged(self, task: str) -> tuple[MergedDraft, ...]:
        """Return the drafts that are merged with the draft of a task and can run; none if that draft cannot run."""
        match = self._by_task.get(task) if self.merges else None
        if match is None or not self._can_propose(own := self.name(task)):
            return ()
        return tuple(one for one in match.merge if one.draft != own and self._can_propose(one.draft))

    def _can_propose(self, draft: str) -> bool:
        """Return whether a draft can run and propose behind tokens of other drafts."""
        return self._known(draft) and self._mergeable(draft)

    def serves(self, draft: str, task: str) -> bool:
        """Return whether a draft proposes for a task, alone or merged with others."""
        return self.name(task) == draft or any(one.draft == draft for one in self.merged(task))
