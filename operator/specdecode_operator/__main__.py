"""``specdecode-operator run``: reads the settings and runs kopf with our handlers until it is told to stop.

``simulate`` runs the same decisions against modelled workers; it needs no cluster.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import sys

import kopf

from specdecode_operator.controller.handlers import kopf_settings, register
from specdecode_operator.errors import SettingsError
from specdecode_operator.settings import Settings, read_settings
from specdecode_operator.simulate import command as simulate


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code: 0 after a stop, 2 for wrong settings or flags."""
    parser = argparse.ArgumentParser("specdecode-operator", description="Keeps SpecDecodeDeployments as they should be")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("run", help="serve the cluster of the pod's service account, or of the current kubeconfig")
    simulate.add_arguments(
        commands.add_parser("simulate", help="this operator, other systems' rules and oracles against modelled workers")
    )
    args = parser.parse_args(argv)
    if args.command == "simulate":
        return simulate.run(args)
    try:
        settings = read_settings(os.environ)
    except SettingsError as error:
        print(f"specdecode-operator: {error}", file=sys.stderr)
        return 2
    run(settings)
    return 0


def run(settings: Settings) -> None:
    """Blocks until SIGINT or SIGTERM."""
    logging.basicConfig(
        level=settings.log_level.upper(), format="%(asctime)s %(levelname)-7s %(name)s: %(message)s", stream=sys.stderr
    )
    _collect_seldom()
    for chatty in ("kopf.objects", "aiohttp.access"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    kopf.run(
        registry=register(settings),
        settings=kopf_settings(),
        standalone=True,
        # Given, because kopf would look the user up in /etc/passwd, and a container's uid need not be there.
        identity=os.environ.get("HOSTNAME", "specdecode-operator"),
        clusterwide=not settings.watch_namespaces,
        namespaces=settings.watch_namespaces,
        liveness_endpoint=f"http://{settings.listen_address}:{settings.port_health}/healthz",
    )


def _collect_seldom() -> None:
    """Nearly all that a look makes goes by reference counts, and several looks in flight are a growing heap to the
    collector: it would go through every imported module again and again, a fifth of a busy operator's time."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


if __name__ == "__main__":
    sys.exit(main())
