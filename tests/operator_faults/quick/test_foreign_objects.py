"""Row 5: objects of other owners with a child's name stay untouched and are named; orphaned children are adopted."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.e2e.release import Release
from support.kube import Manifest, wait_for
from support.operator_faults.figures import Figures
from support.operator_faults.tenant import ServedDeployment, Tenant, stand_in_template

NAME = "foreign"
SELECTOR = {"matchLabels": {"app": "another"}}
FOREIGN = (
    ("service", NAME, {"spec": {"selector": {"app": "another"}, "ports": [{"name": "http", "port": 80}]}}),
    ("pdb", f"{NAME}-worker", {"spec": {"maxUnavailable": 0, "selector": SELECTOR}}),
    ("configmap", f"{NAME}-plan", {"data": {"theirs": "1"}}),
)
KIND_NAMES = {"service": "Service", "pdb": "PodDisruptionBudget", "configmap": "ConfigMap"}


@pytest.fixture
def foreign_objects(tenant: Tenant) -> Iterator[dict[str, Manifest]]:
    """Yield objects of another owner under the names of children, by kind."""
    api, namespace = tenant.api, tenant.namespace
    yield {kind: api.create(kind, namespace, {"metadata": {"name": name}, **body}) for kind, name, body in FOREIGN}
    for kind, name, _ in FOREIGN:
        api.delete(kind, namespace, name)


def owned_content(manifest: Manifest) -> dict[str, object]:
    """Return the parts of an object that its owner wrote."""
    metadata = {key: manifest["metadata"].get(key) for key in ("uid", "labels", "ownerReferences", "annotations")}
    return {"metadata": metadata, "spec": manifest.get("spec"), "data": manifest.get("data")}


@pytest.mark.parametrize("kind", KIND_NAMES)
def test_foreign_object_is_untouched_and_named(
    tenant: Tenant, foreign_objects: dict[str, Manifest], kind: str, figures: Figures
) -> None:
    name = foreign_objects[kind]["metadata"]["name"]
    with tenant.deployment(NAME, ready=False, replicas=0) as served:
        wait_for("the workload exists", lambda: served.child("deployment", "-worker"), timeout_s=30)
        label = f"seconds to a condition that names the {KIND_NAMES[kind]}"
        figures.record_seconds(5, label, lambda: served.is_named(KIND_NAMES[kind], name), limit_s=30)
        now = tenant.api.get(kind, tenant.namespace, name)
        touched = owned_content(now) != owned_content(foreign_objects[kind])
        figures.record(5, f"foreign {KIND_NAMES[kind]} touched", str(touched))
        assert not touched, f"the operator changed {kind} {name}: {owned_content(now)}"
    assert tenant.api.find(kind, tenant.namespace, name), "deleted with a deployment that does not own it"


def owners_of_children(served: ServedDeployment) -> dict[str, set[str]]:
    """Return the uids of the owners of every labelled object that the operator may read, by kind and name."""
    owners = {}
    for kind, name in (child.split("/") for child in served.owned_names() if not child.lower().startswith("secret")):
        metadata = served.api.get(kind, served.namespace, name)["metadata"]
        owners[f"{kind} {name}"] = {owner["uid"] for owner in metadata.get("ownerReferences", [])}
    return owners


def test_orphaned_children_are_adopted(tenant: Tenant, figures: Figures) -> None:
    """Workload, Service, budget and ConfigMaps without a controller get the new resource as theirs.

    The Secret of the admin tokens is used as it is: the operator may create Secrets, and not read or change them.
    """
    api, namespace = tenant.api, tenant.namespace
    with tenant.deployment("orphans", replicas=0) as served:
        wait_for("children exist", lambda: len(owners_of_children(served)) >= 5, timeout_s=30)
        api.delete("sdd", namespace, "orphans", propagation="Orphan")
        wait_for("the resource is gone", lambda: api.find("sdd", namespace, "orphans") is None, timeout_s=30)
        assert not any(owners_of_children(served).values())
        uid = api.create("sdd", namespace, tenant.manifest("orphans", replicas=0))["metadata"]["uid"]

        def all_adopted() -> bool:
            owners = owners_of_children(served)
            assert all(uids == {uid} for uids in owners.values()), owners
            return True

        figures.record_seconds(5, "orphaned children are adopted", all_adopted, limit_s=30)


# Row 7: a template that cannot be merged makes the deployment not Ready, with the reason, until it is repaired.


NAMELESS = {"image": "localhost/nothing:1"}


def test_bad_template_item_is_reported_and_its_repair_applied(
    tenant: Tenant, installation: Release, figures: Figures
) -> None:
    with tenant.deployment("template") as served:
        good = stand_in_template({})
        containers = [*good["spec"]["containers"], NAMELESS]
        served.patch({"workers": {"template": {"spec": {"containers": containers}}}})
        try:
            figures.record_seconds(
                7, "Ready is False", lambda: served.is_condition("Ready", "False"), limit_s=10, every_s=0.2
            )
            assert served.is_named("Ready", "name")
            labels = {"namespace": tenant.namespace, "name": "template", "condition": "Ready"}
            figures.record_seconds(
                7, "the gauge fires", lambda: 0 in installation.gauge("specdecode_condition", **labels), limit_s=10
            )
        finally:
            served.patch({"workers": {"template": {"spec": {"containers": good["spec"]["containers"]}}}})
        figures.record_seconds(
            7, "Ready is True again", lambda: served.is_condition("Ready", "True"), limit_s=5, every_s=0.2
        )


# Row 16, first part: a deleted child returns within five seconds.


CHILDREN = (("deployment", "-worker"), ("service", ""), ("configmap", "-plan"), ("pdb", "-worker"))


def test_deleted_children_return(tenant: Tenant, figures: Figures) -> None:
    with tenant.deployment("deleted", ready=False, replicas=0) as served:
        wait_for("children exist", lambda: all(served.child(*child) for child in CHILDREN), timeout_s=30)
        uids = {child: served.child(*child)["metadata"]["uid"] for child in CHILDREN}
        for kind, suffix in CHILDREN:
            served.api.delete(kind, served.namespace, served.name + suffix)

        def are_back() -> bool:
            children = {child: served.child(*child) for child in CHILDREN}
            missing = [child for child, now in children.items() if not now or now["metadata"]["uid"] == uids[child]]
            assert not missing, missing
            return True

        figures.record_seconds(16, "deleted children return", are_back, limit_s=5, every_s=0.1)
