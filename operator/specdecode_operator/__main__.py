"""Command line of the operator: ``run`` serves a cluster."""

from __future__ import annotations

import argparse
import gc
import logging
import os
import sys
from typing import TYPE_CHECKING

from specdecode_operator.errors import SettingsError

if TYPE_CHECKING:
    from specdecode_operator.settings import Settings


def main(argv: list[str] | None = None) -> int:
    """Run a command. Return the exit code: 0 after a stop, 2 for wrong settings or flags."""
    parser = argparse.ArgumentParser("specdecode-operator", description="Operator of SpecDecodeDeployments")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("run", help="serve the cluster of the pod's service account, or of the current kubeconfig")
    parser.parse_args(argv)
    # Imported here, as below: the help needs neither the models of the API, nor kopf, nor the controller.
    from specdecode_operator.settings import read_settings

    try:
        settings = read_settings(os.environ)
    except SettingsError as error:
        print(f"specdecode-operator: {error}", file=sys.stderr)
        return 2
    run(settings)
    return 0


def run(settings: Settings) -> None:
    """Serve the cluster until SIGINT or SIGTERM."""
    import kopf

    from specdecode_operator.controller.handlers import kopf_settings, register

    logging.basicConfig(
        level=settings.log_level.upper(), format="%(asctime)s %(levelname)-7s %(name)s: %(message)s", stream=sys.stderr
    )
    _collect_garbage_rarely()
    logging.getLogger("kopf.objects").setLevel(logging.WARNING)
    kopf.run(
        registry=register(settings),
        settings=kopf_settings(),
        standalone=True,
        # Set, because kopf would look up the user in /etc/passwd, which need not list the uid of a container.
        identity=settings.identity,
        clusterwide=not settings.watch_namespaces,
        namespaces=settings.watch_namespaces,
    )


def _collect_garbage_rarely() -> None:
    """Make the cyclic collector run rarely.

    Nearly all objects of a reconcile are freed by reference counts. With default thresholds the collector would visit
    every imported module again and again: a fifth of a busy operator's time.
    """
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


if __name__ == "__main__":
    sys.exit(main())
