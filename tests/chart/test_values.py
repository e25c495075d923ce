"""Checks of values.schema.json: it lists what a user may set, and a misspelt value is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml

TYPOS: dict[str, dict[str, Any]] = {
    "top level": {"watchNamespace": ["a"]},
    "image": {"image": {"repo": "x"}},
    "worker": {"worker": {"imagePullpolicy": "Always"}},
    "crds": {"crds": {"enable": False}},
    "metrics": {"metrics": {"serviceMonitor": {"enable": True}}},
    "service account": {"serviceAccount": {"create": True}},
    "resources": {"resources": {"limit": {}}},
    "a string for a list": {"watchNamespaces": "a"},
    "a namespace that cannot be": {"watchNamespaces": ["Team_A"]},
    "log level": {"logLevel": "verbose"},
    "poll seconds": {"pollSeconds": 0.1},
    "pull policy": {"image": {"pullPolicy": "Sometimes"}},
}


@pytest.mark.parametrize("values", TYPOS.values(), ids=TYPOS)
def test_a_typo_is_refused_by_name(chart: Any, values: dict[str, Any]) -> None:
    done = chart.try_template(values)
    assert done.returncode != 0
    name = next(iter(values))
    assert name in done.stderr, done.stderr


def test_schema_and_values_list_the_same_keys(chart: Any) -> None:
    def names(node: dict[str, Any], path: str = "") -> set[str]:
        """Return the paths of the values that the schema lists. Free-form maps are leaves."""
        listed = set()
        for key, child in node.get("properties", {}).items():
            listed |= {path + key} | (names(child, f"{path}{key}.") if path + key != "resources" else set())
        return listed

    def paths(node: dict[str, Any], path: str = "") -> set[str]:
        listed = set()
        for key, child in node.items():
            inner = isinstance(child, dict) and path + key != "resources"
            listed |= {path + key} | (paths(child, f"{path}{key}.") if inner else set())
        return listed

    schema = json.loads((chart.folder / "values.schema.json").read_text())
    values = yaml.safe_load((chart.folder / "values.yaml").read_text())
    assert names(schema) - {"global"} == paths(values)


def test_bounds_equal_those_of_the_operator(chart: Any) -> None:
    from specdecode_operator.settings import Settings

    schema = json.loads((chart.folder / "values.schema.json").read_text())["properties"]
    own = Settings.model_json_schema()["properties"]
    for value, field in {"pollSeconds": "poll_seconds", "concurrency": "concurrency"}.items():
        assert schema[value]["minimum"] == own[field]["minimum"]
        assert schema[value]["maximum"] == own[field]["maximum"]
