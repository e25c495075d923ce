"""Admin tokens of workers, by the deployment that a worker belongs to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from specdecode_router.workers.worker import Endpoint


class BackendTokens:
    """Token for each admin port. A deployment without a token of its own uses that of the router's deployment."""

    def __init__(self, own: Callable[[], str], others: Mapping[str, Callable[[], str]]) -> None:
        self._own, self._others = own, others
        self._by_url: dict[str, Callable[[], str]] = {}

    def update(self, endpoints: Iterable[Endpoint]) -> None:
        """Replace the addresses."""
        self._by_url = {
            one.admin_url: self._others[one.deployment] for one in endpoints if one.deployment in self._others
        }

    def __call__(self, admin_url: str) -> str:
        """Return the current token of the worker with this base URL of its admin port."""
        return self._by_url.get(admin_url, self._own)()
