"""Row 14: names that cannot become the name of a Service are refused at admission."""

from __future__ import annotations

import pytest

from support.operator_faults.figures import Figures
from support.operator_faults.tenant import Tenant, is_refused

pytestmark = pytest.mark.own_operator


@pytest.mark.parametrize("name", ["with.dots", "1-leading-digit"])
def test_name_that_no_service_can_have_is_refused(tenant: Tenant, figures: Figures, name: str) -> None:
    message = is_refused(tenant.api, tenant.namespace, tenant.manifest(name))
    figures.record(14, f"{name} refused", str(bool(message)))
    assert "name" in message, "the API server admitted it"


def test_usual_name_is_admitted(tenant: Tenant) -> None:
    assert not is_refused(tenant.api, tenant.namespace, tenant.manifest("chat-7b"))
