"""metrics-server: what pods use, as HorizontalPodAutoscalers read it. An extra of the cluster; `up` does without."""

from __future__ import annotations

from localcluster import binaries, lifecycle, templates
from localcluster.console import step, wait_for
from localcluster.control_plane import answers, kubectl
from localcluster.node import import_image
from localcluster.settings import METRICS_SERVER_IMAGE, Layout


def install(layout: Layout) -> None:
    """Returns when the API serves metrics; nothing to do when it does. It goes with the cluster."""
    lifecycle.require_up(layout)
    binaries.build_for_metrics(layout)
    with step("Starting metrics-server"):
        import_image(layout, layout.metrics_server / "metrics-server", METRICS_SERVER_IMAGE)
        kubectl(layout, "apply", "-f", "-", stdin=templates.text(layout, "metrics-server.yaml"))
        rollout = ("rollout", "status", "deployment/metrics-server", "--namespace=kube-system")
        kubectl(layout, *rollout, "--timeout=120s")
        wait_for("metrics of the node", lambda: answers(layout, "top", "node"), timeout_s=120)
