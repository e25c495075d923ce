"""Command line of ``kubectl specdecode``. kubectl runs the program kubectl-specdecode that it finds on PATH."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING

from pydantic import ValidationError

from specdecode_operator.api.pins import Pin, pin_operations, read_pin
from specdecode_operator.errors import OperatorError, PluginError
from specdecode_operator.plugin.drafts import change_for, drafts, offer
from specdecode_operator.plugin.explain import explain, past
from specdecode_operator.plugin.overview import spec_of

if TYPE_CHECKING:
    from specdecode_operator.plugin.api import Api

DRAFT_COMMANDS = {
    "promote": "promote a draft that its trial found better (mode Manual)",
    "distill": "train a draft from captured requests; one worker then tries it",
    "reject": "end a training run, or the trial or promotion of a draft before it serves everywhere",
    "rollback": "return to the draft before the last promotion",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return the exit code: 0, or 1 with a sentence on standard error."""
    args = _parser().parse_args(argv)
    # Imported here, because the help does not need the client of Kubernetes.
    from specdecode_operator.plugin.api import Api

    try:
        args.command(args, Api(args.kubeconfig, args.context))
        return 0
    except OperatorError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        print(f"error: the deployment has another API version than this plugin: {where}", file=sys.stderr)
        return 1
    except (KeyboardInterrupt, BrokenPipeError):
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "kubectl specdecode",
        description="Show what speculative decoding does in each deployment, and why.",
        parents=[_common(is_main=True)],
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, command: Callable[..., object], text: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, parents=[_common(is_main=False)], help=text, description=text)
        added.add_argument("name", metavar="NAME", help="name of a SpecDecodeDeployment")
        added.set_defaults(command=command)
        return added

    add("explain", _explain, "show the reasons for depth and number of workers, with the measurements")
    add("history", _history, "show the latest decisions with measurements, expected gain and realised gain")
    pin = add("pin", _pin, "fix the shape at every load, in any mode (spec.speculation.pin); the guard stays active")
    pin.add_argument("shape", metavar="SHAPE", help="chain:3, none, or one per task: code=chain:6,chat=none")
    add("unpin", _unpin, "remove the pin; the mode decides again")
    add("drafts", _drafts, "show the draft in use, the trial of another one, and the candidates before it")
    trial = add("try", _try, "offer a draft: one worker tries it, and a faster one is promoted")
    trial.add_argument("uri", metavar="URI", help="where the draft comes from, such as pvc://drafts/week-47")
    trial.add_argument("hash", metavar="HASH", nargs="?", help="hash of the draft's files (default: what lies there)")
    for verb, text in DRAFT_COMMANDS.items():
        add(verb, partial(_command, verb), text)
    return parser


def _common(*, is_main: bool) -> argparse.ArgumentParser:
    """Return the options that may stand before and after the command. After it they have no defaults, which would
    replace the values from before it."""
    default = None if is_main else argparse.SUPPRESS
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument(
        "-n", "--namespace", default=default, help="namespace of the deployment (default: that of the context)"
    )
    common.add_argument("--context", default=default, help="context of the kubeconfig (default: the current one)")
    common.add_argument(
        "--kubeconfig", default=default, help="kubeconfig file (default: KUBECONFIG, else ~/.kube/config)"
    )
    return common


def _where(args: argparse.Namespace, api: Api) -> str:
    return str(args.namespace or api.namespace)


def _print(lines: Sequence[str]) -> None:
    print("\n".join(lines), flush=True)


def _explain(args: argparse.Namespace, api: Api) -> None:
    resource = api.get(_where(args, api), args.name)
    learned, problem = None, "the operator has not stored any yet"
    try:
        learned = api.learned_state(resource)
    except PluginError as error:
        problem = str(error)
    _print(explain(resource, learned, time.time(), problem))


def _history(args: argparse.Namespace, api: Api) -> None:
    _print(past(api.get(_where(args, api), args.name), time.time()))


def _pin(args: argparse.Namespace, api: Api) -> None:
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


def _unpin(args: argparse.Namespace, api: Api) -> None:
    namespace = _where(args, api)
    resource = api.get(namespace, args.name)
    if operations := pin_operations(resource, Pin()):
        api.edit(namespace, args.name, operations)
    mode = (resource["spec"].get("speculation") or {}).get("mode", "Auto")
    print(f"{args.name} is not pinned any more. Its mode is {mode}.")


def _drafts(args: argparse.Namespace, api: Api) -> None:
    namespace = _where(args, api)
    _print(drafts(api.get(namespace, args.name), api.drafts(namespace, args.name), time.time()))


def _try(args: argparse.Namespace, api: Api) -> None:
    namespace = _where(args, api)
    resource = api.get(namespace, args.name)
    offered = offer(resource, api.drafts(namespace, args.name), args.uri, args.hash)
    if isinstance(offered, str):
        api.set_role(namespace, offered, "Candidate")
    else:
        api.create_draft(namespace, offered)
    print(f"{args.name} tries {args.uri}. To watch it: kubectl specdecode drafts {args.name}")


def _command(verb: str, args: argparse.Namespace, api: Api) -> None:
    """Change the deployment or a draft as a verb asks for."""
    namespace = _where(args, api)
    now = datetime.fromtimestamp(time.time(), UTC).isoformat(timespec="milliseconds")
    change = change_for(verb, api.get(namespace, args.name), api.drafts(namespace, args.name), now)
    if change.spec is not None:
        api.change(namespace, args.name, change.spec)
    else:
        api.set_role(namespace, change.draft, change.role)
    print(f"{verb} was requested. To see the result: kubectl specdecode drafts {args.name}")


if __name__ == "__main__":
    sys.exit(main())
