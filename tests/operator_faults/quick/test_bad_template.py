"""Row 7: a template that cannot be merged makes the deployment not Ready, with the reason, until it is repaired."""

from __future__ import annotations

import time

from support.kube import wait_for
from support.operator_faults.figures import Figures
from support.operator_faults.installation import Installation
from support.operator_faults.tenant import Tenant, stand_in_template

NAMELESS = {"image": "localhost/nothing:1"}


def test_bad_template_item_is_reported_and_its_repair_applied(
    tenant: Tenant, installation: Installation, figures: Figures
) -> None:
    with tenant.deployment("template") as served:
        good = stand_in_template({})
        containers = [*good["spec"]["containers"], NAMELESS]
        started = time.monotonic()
        served.patch({"workers": {"template": {"spec": {"containers": containers}}}})
        try:
            wait_for("not Ready", lambda: served.is_condition("Ready", "False"), timeout_s=10, every_s=0.2)
            figures.record(7, "seconds to Ready=False", time.monotonic() - started)
            assert served.named("Ready", "name"), served.conditions()["Ready"]
            labels = {"namespace": tenant.namespace, "name": "template", "condition": "Ready"}
            wait_for("the gauge fires", lambda: 0 in installation.gauge("specdecode_condition", **labels), timeout_s=10)
            figures.record(7, "seconds to the gauge", time.monotonic() - started)
        finally:
            served.patch({"workers": {"template": {"spec": {"containers": good["spec"]["containers"]}}}})
            repaired = time.monotonic()
        wait_for("Ready again", lambda: served.is_condition("Ready", "True"), timeout_s=5, every_s=0.2)
        figures.record(7, "seconds to Ready=True after the repair", time.monotonic() - repaired)
