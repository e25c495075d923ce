"""``kubectl specdecode``: the command line. kubectl finds it as the program kubectl-specdecode on PATH."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence

from pydantic import ValidationError

from specdecode_operator.api.pins import read_pin
from specdecode_operator.api.v1alpha1 import PAUSED_ANNOTATION
from specdecode_operator.errors import OperatorError, PluginError
from specdecode_operator.plugin.api import Api
from specdecode_operator.plugin.explain import explain
from specdecode_operator.plugin.overview import detail, overview, spec_of
from specdecode_operator.plugin.past import past
from specdecode_operator.plugin.simulation import hand_over

CLEAR = "\x1b[H\x1b[2J\x1b[3J"


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, or 1 with a sentence on standard error."""
    args = _parser().parse_args(argv)
    try:
        return int(args.command(args, Api(args.kubeconfig, args.context)) or 0)
    except OperatorError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        print(f"error: the cluster's resource is of another version than this program: {where}", file=sys.stderr)
        return 1
    except (KeyboardInterrupt, BrokenPipeError):
        return 0


def _parser() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("-n", "--namespace", help="namespace of the deployment; the context's when absent")
    common.add_argument("--context", help="context of the kubeconfig")
    common.add_argument("--kubeconfig", help="kubeconfig file; KUBECONFIG or ~/.kube/config when absent")
    parser = argparse.ArgumentParser("kubectl specdecode", description="What speculative decoding does here, and why.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, command: Callable[..., object], text: str, *, optional: bool = False) -> argparse.ArgumentParser:
        found = commands.add_parser(name, parents=[common], help=text, description=text)
        found.add_argument("name", metavar="NAME", nargs="?" if optional else None, help="a SpecDecodeDeployment")
        found.set_defaults(command=command)
        return found

    status = add("status", _status, "every deployment in a line; with NAME its tasks and conditions", optional=True)
    status.add_argument("-A", "--all-namespaces", action="store_true")
    status.add_argument("-w", "--watch", action="store_true", help="draw it anew until interrupted")
    status.add_argument("--interval", type=_seconds, default=2.0, metavar="SECONDS", help="of --watch (default: 2)")
    add("explain", _explain, "why this depth, why this many workers, and the numbers behind")
    add("history", _history, "the last decisions: what was measured, expected and realised")
    pin = add("pin", _pin, "hold a shape at every load, whatever the mode; the guard stays on")
    pin.add_argument("shape", metavar="SHAPE", help="chain:3, none, or tasks: code=chain:6,chat=none")
    add("unpin", _unpin, "give the deployment back to its mode")
    simulate = add("simulate", _simulate, "replay the deployment against modelled workers, with what was measured here")
    simulate.add_argument("rest", nargs=argparse.REMAINDER, metavar="...", help="flags of specdecode-operator simulate")
    return parser


def _seconds(text: str) -> float:
    value = float(text)
    if value < 0.2:
        raise argparse.ArgumentTypeError("at least 0.2 seconds")
    return value


def _where(args: argparse.Namespace, api: Api) -> str:
    return str(args.namespace or api.namespace)


def _print(lines: Sequence[str]) -> None:
    print("\n".join(lines), flush=True)


def _status(args: argparse.Namespace, api: Api) -> None:
    while True:
        lines = _status_lines(args, api)
        if args.watch and sys.stdout.isatty():
            print(CLEAR, end="")
        _print(lines)
        if not args.watch:
            return
        time.sleep(args.interval)


def _status_lines(args: argparse.Namespace, api: Api) -> list[str]:
    if args.name and args.all_namespaces:
        raise PluginError("a NAME is of one namespace: leave out --all-namespaces")
    if args.name:
        return detail(api.get(_where(args, api), args.name), time.time())
    found = api.list(None if args.all_namespaces else _where(args, api))
    return overview(found, time.time(), namespaces=args.all_namespaces)


def _explain(args: argparse.Namespace, api: Api) -> None:
    namespace = _where(args, api)
    resource = api.get(namespace, args.name)
    learned, problem = None, "nothing is written down yet"
    try:
        learned = api.remembered(namespace, args.name)
    except PluginError as error:
        problem = str(error)
    _print(explain(resource, learned, time.time(), problem))


def _history(args: argparse.Namespace, api: Api) -> None:
    _print(past(api.get(_where(args, api), args.name), time.time()))


def _pin(args: argparse.Namespace, api: Api) -> None:
    """A slip is refused here, before it is written."""
    namespace = _where(args, api)
    resource = api.get(namespace, args.name)
    if read_pin(args.shape, spec_of(resource).speculation) is None:
        raise PluginError("a shape is missing; write chain:3, none, or use unpin")
    api.pin(namespace, args.name, args.shape)
    print(f"{args.name} is pinned to {args.shape}; `kubectl specdecode unpin {args.name}` gives it back")
    if (resource["metadata"].get("annotations") or {}).get(PAUSED_ANNOTATION, "false") != "false":
        print("it is paused: the pin waits until the annotation specdecode.io/paused is gone")


def _unpin(args: argparse.Namespace, api: Api) -> None:
    resource = api.pin(_where(args, api), args.name, None)
    mode = (resource["spec"].get("speculation") or {}).get("mode", "Auto")
    print(f"{args.name} follows its mode again: {mode}")


def _simulate(args: argparse.Namespace, api: Api) -> int:
    namespace = _where(args, api)
    resource = api.get(namespace, args.name)
    return hand_over(resource, api.remembered(namespace, args.name), args.rest)


if __name__ == "__main__":
    sys.exit(main())
