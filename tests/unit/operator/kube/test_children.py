"""Records of children."""

from __future__ import annotations

from typing import Any

from specdecode_operator.api.v1alpha1 import KIND
from specdecode_operator.kube.apply import project_child
from specdecode_operator.kube.kinds import CONFIG_MAPS, FIELD_MANAGER
from support.operators.kube_objects import config_map, owned


def test_records_have_what_decides() -> None:
    manifest = owned(config_map("ns", "c", parent="x"), "me")
    manifest["metadata"] |= {"uid": "u", "deletionTimestamp": "now"}
    record = project_child(CONFIG_MAPS)(manifest)
    assert record.child == ("ConfigMap", "ns", "c")
    assert (record.uid, record.controller_uid, record.controller_kind, record.controller_name) == ("u", "me", KIND, "x")
    assert (record.deployment, record.labelled, record.deleting) == ("x", True, True)
    bare = project_child(CONFIG_MAPS)({"metadata": {"name": "c", "namespace": "ns", "uid": "u"}})
    assert (bare.controller_uid, bare.labelled, bare.deleting) == (None, False, False)


def test_only_applied_entries_of_ours_count() -> None:
    def digest(*entries: dict[str, Any]) -> str:
        metadata = {"name": "c", "namespace": "ns", "uid": "u", "managedFields": list(entries)}
        return project_child(CONFIG_MAPS)({"metadata": metadata}).ours_digest

    ours = {"manager": FIELD_MANAGER, "operation": "Apply", "fieldsV1": {"f:data": {}}}
    assert digest(ours) == digest({"manager": "theirs", "operation": "Apply"}, ours)
    assert digest(ours) == digest(ours, {**ours, "subresource": "status"}, {**ours, "operation": "Update"})
    assert digest(ours) != digest({**ours, "fieldsV1": {}})
