"""Commands of ``kubectl specdecode``, which its help does not import."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from datetime import UTC, datetime

from specdecode_operator.api.speculation import Pin, pin_operations, read_pin
from specdecode_operator.errors import PluginError
from specdecode_operator.plugin.api import Api
from specdecode_operator.plugin.drafts import change_for, drafts, offer
from specdecode_operator.plugin.explain import explain, past
from specdecode_operator.plugin.overview import spec_of


def _where(args: argparse.Namespace, api: Api) -> str:
    return str(args.namespace or api.namespace)


def _print(lines: Sequence[str]) -> None:
    print("\n".join(lines), flush=True)


def run_explain(args: argparse.Namespace, api: Api) -> None:
    """Print why depth and number of workers are what they are."""
    resource = api.get(_where(args, api), args.name)
    learned, problem = None, "the operator has not stored any yet"
    try:
        learned = api.learned_state(resource)
    except PluginError as error:
        problem = str(error)
    _print(explain(resource, learned, time.time(), problem))


def run_history(args: argparse.Namespace, api: Api) -> None:
    """Print the latest decisions."""
    _print(past(api.get(_where(args, api), args.name), time.time()))


def run_pin(args: argparse.Namespace, api: Api) -> None:
    """Set the pin. An invalid shape is refused before anything is written."""
    namespace = _where(args, api)
    resource = api.get(namespace, args.name)
    pin = read_pin(args.shape, spec_of(resource).speculation)
    if pin is None:
        raise PluginError("SHAPE is empty; write chain:3 or none, or use unpin")
    api.edit(namespace, args.name, pin_operations(resource, pin))
    print(f"{args.name} is pinned to {args.shape}. To remove the pin: kubectl specdecode unpin {args.name}")
    if resource["spec"].get("paused"):
        print("The deployment is paused. The pin takes effect when spec.paused is false.")


def run_unpin(args: argparse.Namespace, api: Api) -> None:
    """Remove the pin."""
    namespace = _where(args, api)
    resource = api.get(namespace, args.name)
    if operations := pin_operations(resource, Pin()):
        api.edit(namespace, args.name, operations)
    mode = (resource["spec"].get("speculation") or {}).get("mode", "Auto")
    print(f"{args.name} is not pinned any more. Its mode is {mode}.")


def run_drafts(args: argparse.Namespace, api: Api) -> None:
    """Print the draft in use and the candidates."""
    namespace = _where(args, api)
    _print(drafts(api.get(namespace, args.name), api.drafts(namespace, args.name), time.time()))


def run_try(args: argparse.Namespace, api: Api) -> None:
    """Offer a draft."""
    namespace = _where(args, api)
    resource = api.get(namespace, args.name)
    offered = offer(resource, api.drafts(namespace, args.name), args.uri, args.hash)
    if isinstance(offered, str):
        api.set_role(namespace, offered, "Candidate")
    else:
        api.create_draft(namespace, offered)
    print(f"{args.name} tries {args.uri}. To watch it: kubectl specdecode drafts {args.name}")


def change_draft(verb: str, args: argparse.Namespace, api: Api) -> None:
    """Change the deployment or a draft as a verb asks for."""
    namespace = _where(args, api)
    now = datetime.fromtimestamp(time.time(), UTC).isoformat(timespec="milliseconds")
    change = change_for(verb, api.get(namespace, args.name), api.drafts(namespace, args.name), now)
    if change.spec is not None:
        api.change(namespace, args.name, change.spec)
    else:
        api.set_role(namespace, change.draft, change.role)
    print(f"{verb} was requested. To see the result: kubectl specdecode drafts {args.name}")
