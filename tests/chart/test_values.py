"""Checks of values.schema.json: it lists and describes what a user may set, and refuses the rest by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

VALUES = Path(__file__).parents[2] / "helm" / "specdecode"
OPEN = ("global", "worker.template", "worker.modelCache", "router.template", "podSecurityContext", "securityContext")
"""Values whose inside the schema leaves to Kubernetes."""
FREE_FORM = ("resources", "affinity", *OPEN)
"""Values whose inside is that of a Kubernetes field: values.yaml does not repeat it."""

TYPOS: dict[str, dict[str, Any]] = {
    "top level": {"watchNamespace": ["a"]},
    "digest": {"image": {"digest": "latest"}},
    "a template": {"worker": {"template": {"tolerations": []}}},
    "two sources of a cache": {"worker": {"modelCache": {"emptyDir": {}, "persistentVolumeClaim": {"claimName": "a"}}}},
    "peer": {"networkPolicy": {"metricsFrom": [{"namespace": "monitoring"}]}},
    "affinity": {"affinity": {"podAntiAfinity": {}}},
    "a toleration": {"tolerations": [{"keys": "a"}]},
    "a namespace that cannot be": {"watchNamespaces": ["Team_A"]},
    "log level": {"logLevel": "verbose"},
    "poll seconds": {"pollSeconds": 0.1},
    "replicas": {"replicas": 6},
    "pull policy": {"image": {"pullPolicy": "Sometimes"}},
}


def read_schema() -> dict[str, Any]:
    return json.loads((VALUES / "values.schema.json").read_text())  # type: ignore[no-any-return]


def schema_paths(node: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every value that the schema lists with its own part of the schema."""
    for key, child in node.get("properties", {}).items():
        yield path + key, child
        yield from schema_paths(child, f"{path}{key}.")


def value_paths(node: dict[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value of values.yaml. The inside of free-form values is left out."""
    for key, child in node.items():
        yield path + key, child
        if isinstance(child, dict) and path + key not in FREE_FORM:
            yield from value_paths(child, f"{path}{key}.")


DEFAULTS = dict(value_paths(yaml.safe_load((VALUES / "values.yaml").read_text())))


def nested(path: str, value: Any) -> dict[str, Any]:
    for key in reversed(path.split(".")):
        value = {key: value}
    return value  # type: ignore[no-any-return]


@pytest.mark.parametrize("values", TYPOS.values(), ids=TYPOS)
def test_a_typo_is_refused_by_name(chart: Any, values: dict[str, Any]) -> None:
    done = chart.try_template(values)
    assert done.returncode != 0
    name = next(iter(values))
    assert name in done.stderr, done.stderr


@pytest.mark.parametrize("path", DEFAULTS)
def test_a_wrong_type_is_refused_by_name(chart: Any, path: str) -> None:
    """A map that no value allows is refused for every value; a string is refused for a map."""
    wrong: Any = "text" if isinstance(DEFAULTS[path], dict) else {"unexpected": {"map": []}}
    done = chart.try_template(nested(path, wrong))
    assert done.returncode != 0
    assert f"- {path}" in done.stderr, done.stderr


def test_a_list_or_map_that_is_left_empty_is_the_default(chart: Any) -> None:
    """`template:` with nothing but comments below it is null, for which helm removes the default."""
    asked: dict[str, Any] = {
        "metrics": {name: {"enabled": True} for name in ("serviceMonitor", "podMonitor", "rules", "dashboard")}
    }
    expected = chart.template(asked)
    for path in (path for path, value in DEFAULTS.items() if value in ({}, [])):
        *parents, name = path.split(".")
        node = asked
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = None
    assert chart.template(asked) == expected


def test_schema_and_values_list_the_same_keys() -> None:
    inside = tuple(f"{path}." for path in FREE_FORM)
    listed = {path for path, _ in schema_paths(read_schema()) if not path.startswith(inside)}
    assert listed - {"global"} == set(DEFAULTS)


def test_every_value_has_a_description() -> None:
    for path, part in schema_paths(read_schema()):
        assert part.get("description", "").endswith("."), path


def test_no_object_of_the_schema_allows_unlisted_keys() -> None:
    """Only what helm and Kubernetes define is open, such as the inside of the three affinities."""
    for path, part in (("", read_schema()), *schema_paths(read_schema())):
        if part.get("type") == "object" and path not in OPEN and not path.startswith("affinity."):
            assert part["additionalProperties"] is False, path


def test_bounds_equal_those_of_the_operator() -> None:
    from specdecode_operator.settings import Settings

    schema = read_schema()["properties"]
    own = Settings.model_json_schema()["properties"]
    for value, field in {"pollSeconds": "poll_seconds", "concurrency": "concurrency"}.items():
        assert schema[value]["minimum"] == own[field]["minimum"]
        assert schema[value]["maximum"] == own[field]["maximum"]


def test_reused_values_of_another_chart_are_refused_with_the_flag_to_use(chart: Any, tmp_path: Path) -> None:
    """`helm upgrade --reuse-values` hides the defaults of the new chart from its templates."""
    chart.folder = shutil.copytree(VALUES, tmp_path / "reused")
    values = yaml.safe_load((VALUES / "values.yaml").read_text())
    del values["leaderElection"]
    (chart.folder / "values.yaml").write_text(yaml.safe_dump(values))
    done = chart.try_template({})
    assert done.returncode != 0
    assert "--reset-then-reuse-values" in done.stderr
