"""Command line entry point ``specdecode-router serve``."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys

from pydantic import ValidationError

from specdecode_router.errors import CannotStart
from specdecode_router.settings import RouterSettings
from specdecode_worker.contract import Env
from specdecode_worker.http_edge import UnusableFiles

_DEFAULTS = RouterSettings()


def main(argv: list[str] | None = None) -> int:
    """Run the command. Return 0 after a clean shutdown, 1 for an error of the run, 2 for wrong usage."""
    args = _parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    given = {name: value for name, value in vars(args).items() if name != "command"}
    try:
        settings = RouterSettings.model_validate(given)
    except ValidationError as error:
        return _refuse("; ".join(_problem(*one["loc"], text=one["msg"]) for one in error.errors()), 2)
    # Imported here, because the help does not need the server.
    import uvloop

    from specdecode_router.process import serve

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(serve(settings))
    except (CannotStart, UnusableFiles) as error:
        return _refuse(str(error), 1)


def _problem(*location: int | str, text: str) -> str:
    """Return one error of the settings, with its flag if it is of one field."""
    return f"--{location[0]}: {text}".replace("_", "-") if location else text


def _refuse(message: str, code: int) -> int:
    print(f"specdecode-router serve: {message}", file=sys.stderr)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("specdecode-router", description="One OpenAI endpoint before several workers.")
    commands = parser.add_subparsers(dest="command", required=True)
    serve = commands.add_parser("serve", help="serve clients", description="Serve clients from several workers.")
    serve.epilog = f"The token of the workers' admin ports is in ${Env.admin_token} or in --admin-token-file."
    serve.allow_abbrev = False
    serve.add_argument("--host", default=_DEFAULTS.host, help="address to listen on (default: %(default)s)")
    serve.add_argument("--port", type=int, default=_DEFAULTS.port, help="0 takes a free one (default: %(default)s)")
    serve.add_argument("--worker", dest="workers", action="append", default=[], metavar="ADMIN_URL",
                       help="base URL of a worker's admin port; once for each worker")  # fmt: skip
    serve.add_argument("--namespace", help="namespace of --service")
    serve.add_argument("--service", metavar="NAME", help="headless Service of the workers, instead of --worker")
    serve.add_argument("--deployment", default="", metavar="NAME", help="name of the workers' deployment, for metrics")
    serve.add_argument("--backend", dest="backends", action="append", default=[],
                       metavar="name=N,percent=P,service=S,token-file=F",
                       help="another deployment with a share of the traffic; worker=ADMIN_URL instead of service "
                       "where --worker is used")  # fmt: skip
    serve.add_argument("--demand-config-map", metavar="NAME", help="reports held requests to the operator")
    serve.add_argument("--live-settings-file", metavar="FILE",
                       help="JSON with hold_seconds, no_worker_seconds, min_silence_seconds, max_silence_seconds, and "
                       "percents of --backend by name; read again when it changes")  # fmt: skip
    serve.add_argument("--tls-cert-file", metavar="FILE", help="certificate chain of this port, as PEM")
    serve.add_argument("--tls-key-file", metavar="FILE", help="PEM key of the certificate, without a password")
    serve.add_argument("--admin-token-file", metavar="FILE",
                       help="tokens of the workers' admin ports, one a line; read again when it changes")  # fmt: skip
    serve.add_argument("--ca-file", metavar="FILE",
                       help="PEM certificates that sign those of the workers; read again when it changes")  # fmt: skip
    serve.add_argument("--api-keys-path", metavar="PATH",
                       help="folder of tenants' keys, or file with one a line; read again when it changes")  # fmt: skip
    for name, text in _NUMBERS.items():
        kind: type = int if RouterSettings.model_fields[name].annotation is int else float
        serve.add_argument(f"--{name.replace('_', '-')}", type=kind, default=getattr(_DEFAULTS, name),
                           metavar="S" if name.endswith("seconds") else "N",
                           help=f"{text} (default: %(default)s)")  # fmt: skip
    return parser


_NUMBERS = {
    "max_waiting": "requests that wait for a place; more get 429",
    "max_waiting_per_tenant": "the same, of one tenant",
    "max_waiting_bytes": "of the bodies of all requests that wait; a tenant may have a quarter",
    "max_held": "requests that are held while there is no worker; more get 503",
    "hold_seconds": "for which a request is held without a worker",
    "request_timeout_seconds": "longest time of a request; X-Request-Timeout lowers it",
    "header_timeout_seconds": "for the headers of a connection's first request",
    "max_connections": "beyond it, connections without a request are closed",
    "body_timeout_seconds": "for the body of a request",
    "write_timeout_seconds": "for a client to read output that is ready",
    "max_body_bytes": "of one request",
    "max_unfinished_body_bytes": "of all bodies that are still arriving",
    "max_unsent_bytes": "output of one stream that waits for its client",
    "endpoint_delay_seconds": "after SIGTERM, in which new requests are still served",
    "grace_period_seconds": "after the endpoint delay, for running requests",
    "connect_seconds": "for a connection to a worker",
    "open_seconds": "from a request to its acceptance, after which a second worker is asked",
    "no_worker_seconds": "in which a request waits for another worker after a failure",
    "max_refusals": "workers that may refuse a request",
    "max_crashes": "workers that may fail while they serve one request",
    "min_silence_seconds": "least silence after which a worker is suspected",
    "max_silence_seconds": "longest silence after which a worker is suspected",
    "failure_cooldown_seconds": "for which a worker is avoided after a failed connection",
    "load_seconds": "interval and deadline of the workers' loads",
}


if __name__ == "__main__":
    sys.exit(main())
