"""Command line of ``kubectl specdecode``. kubectl runs the program kubectl-specdecode that it finds on PATH."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from specdecode_operator.errors import OperatorError

DRAFT_COMMANDS = {
    "promote": "promote a draft that its trial found better (mode Manual)",
    "distill": "train a draft from captured requests; one worker then tries it",
    "reject": "end a training run, or the trial or promotion of a draft before it serves everywhere",
    "rollback": "return to the draft before the last promotion",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return the exit code: 0, or 1 with a sentence on standard error."""
    args = _parser().parse_args(argv)
    # Imported here, because the help needs neither the client of Kubernetes nor the models of the API.
    from pydantic import ValidationError

    from specdecode_operator.plugin import commands
    from specdecode_operator.plugin.api import Api

    try:
        api = Api(args.kubeconfig, args.context)
        if args.command in DRAFT_COMMANDS:
            commands.change_draft(args.command, args, api)
        else:
            getattr(commands, f"run_{args.command}")(args, api)
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

    def add(name: str, text: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, parents=[_common(is_main=False)], help=text, description=text)
        added.add_argument("name", metavar="NAME", help="name of a SpecDecodeDeployment")
        added.set_defaults(command=name)
        return added

    add("explain", "show the reasons for depth and number of workers, with the measurements")
    add("history", "show the latest decisions with measurements, expected gain and realised gain")
    pin = add("pin", "fix the shape at every load, in any mode (spec.speculation.pin); the guard stays active")
    pin.add_argument("shape", metavar="SHAPE", help="chain:3, none, or one per task: code=chain:6,chat=none")
    add("unpin", "remove the pin; the mode decides again")
    add("drafts", "show the training run or the trial that is under way, and the latest verdicts")
    trial = add("try", "offer a draft: one worker tries it, and a faster one is promoted")
    trial.add_argument("uri", metavar="URI", help="where the draft comes from, such as pvc://drafts/week-47")
    trial.add_argument("hash", metavar="HASH", nargs="?", help="hash of the draft's files (default: what lies there)")
    for verb, text in DRAFT_COMMANDS.items():
        add(verb, text)
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


if __name__ == "__main__":
    sys.exit(main())
