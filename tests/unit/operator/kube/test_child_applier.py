"""Apply of children without an API server: what is sent, what is refused, and when it is tried again."""

from __future__ import annotations

from typing import Any

import pytest

from specdecode_operator.api.v1alpha1 import KIND
from specdecode_operator.errors import ClusterError, Conflict, NotLeader, Refused, Unavailable
from specdecode_operator.kube.apply import ChildApplier, ChildRecord, project_child
from specdecode_operator.kube.kinds import CONFIG_MAPS, FIELD_MANAGER, Child
from specdecode_operator.types import ChildProblem
from support.operators.kube_objects import config_map, owned

KEY = ("ns", "x")
HPA = "kube-controller-manager"
CHILD = ("ConfigMap", "ns", "x-plan")


class World:
    """API server with ConfigMaps, an informer that the test lets catch up, and a clock."""

    def __init__(self) -> None:
        self.objects: dict[str, dict[str, Any]] = {}
        self.seen: dict[Child, ChildRecord] = {}
        self.requests: list[str] = []
        self.options: list[dict[str, Any]] = []
        self.error: Exception | None = None
        self.now = 100.0
        self.applier = self.restarted()

    def restarted(self) -> ChildApplier:
        client: Any = self
        return ChildApplier(client, lambda child: self.seen.get(child), lambda: self.now)

    async def get(self, kind: Any, namespace: str, name: str, *, metadata_only: bool) -> dict[str, Any] | None:
        self.requests.append("get")
        return self.objects.get(name)

    async def apply(self, manifest: dict[str, Any], **options: Any) -> dict[str, Any]:
        self.requests.append("apply")
        self.options.append(options)
        if self.error:
            raise self.error
        metadata = manifest["metadata"]
        uid = self.objects.get(metadata["name"], {"metadata": {"uid": f"uid-{len(self.options)}"}})["metadata"]["uid"]
        ours = {"manager": FIELD_MANAGER, "operation": "Apply", "time": str(len(self.options))}
        stored = {**manifest, "metadata": {**metadata, "uid": uid, "managedFields": [ours]}}
        self.objects[metadata["name"]] = stored
        return stored

    def put(self, manifest: dict[str, Any]) -> None:
        """Create an object as another client would."""
        self.objects[manifest["metadata"]["name"]] = {**manifest, "metadata": {**manifest["metadata"], "uid": "theirs"}}

    def catch_up(self) -> None:
        """Let the informer see all objects that have our label."""
        records = [project_child(CONFIG_MAPS)(resource) for resource in self.objects.values()]
        self.seen = {record.child: record for record in records if record.labelled}

    def retry_seconds(self) -> float | None:
        return self.applier.retry_seconds([config_map("ns", "x-plan")])

    def drift(self) -> None:
        """Take a field over, as another client would, and let the informer see it."""
        ours = {"manager": FIELD_MANAGER, "operation": "Apply", "fieldsV1": {}}
        self.objects["x-plan"]["metadata"]["managedFields"] = [ours]
        self.catch_up()

    async def send(self, **data: str) -> ChildProblem | None:
        return await self.applier.apply(owned(config_map("ns", "x-plan", **data), "me"), "me")

    async def settle(self, **data: str) -> None:
        """Apply until the informer shows what was applied, and the applier has seen that."""
        await self.send(**data)
        self.catch_up()
        await self.send(**data)


@pytest.fixture
def world() -> World:
    return World()


async def test_an_absent_child_is_made_without_force_and_then_rests(world: World) -> None:
    assert await world.send() is None
    assert world.requests == ["get", "apply"]
    assert world.options == [{"force": False}]
    world.catch_up()
    for _ in range(3):
        world.now += 100
        assert await world.send() is None
    assert world.requests == ["get", "apply"]


async def test_an_informer_that_lags_behind_causes_no_second_apply(world: World) -> None:
    await world.send()
    assert await world.send() is None
    assert len(world.requests) == 2
    assert world.retry_seconds() is None
    assert not world.applier.is_confirmed([config_map("ns", "x-plan")]), "the reconciler asks for a check"
    world.now += 3
    await world.send()
    assert world.requests[2:] == ["get", "apply"], "an informer that stays behind is not believed for ever"


async def test_a_child_that_is_deleted_again_is_made_again(world: World) -> None:
    await world.settle()
    assert world.retry_seconds() is None
    world.objects.clear()
    world.catch_up()
    await world.send()
    assert world.requests[2:] == ["get", "apply"]


async def test_drift_and_changes_are_applied_to_that_object_alone(world: World) -> None:
    await world.settle(a="1")
    world.drift()
    await world.send(a="1")
    assert world.requests[2:] == ["apply"]
    world.catch_up()
    await world.send(a="2")
    assert world.requests[3:] == ["apply"]
    assert world.options[1:] == [{"force": True, "uid": "uid-1"}] * 2


async def test_another_controller_that_changes_the_same_field_causes_few_applies(world: World) -> None:
    await world.send()
    waited = []
    for _ in range(10):
        world.catch_up()
        await world.send()
        world.drift()
        sent = len(world.requests)
        while True:
            await world.send()
            if len(world.requests) > sent:
                break
            seconds = world.retry_seconds()
            assert seconds is not None, "the repair is forgotten"
            waited.append(round(seconds))
            world.now += seconds
    assert waited == [1, 2, 4, 8, 16, 32, 60, 60]
    world.now += 120
    for _ in range(2):
        sent = len(world.requests)
        world.catch_up()
        await world.send()
        world.drift()
        await world.send()
        assert len(world.requests) == sent + 1, "after a quiet time repairs are immediate again"


async def test_a_change_that_is_undone_before_its_repair_needs_none(world: World) -> None:
    for _ in range(3):
        await world.settle()
        rested = dict(world.objects)
        world.objects.clear()
        world.catch_up()
        await world.send()
    assert world.retry_seconds() == 1
    world.objects = rested
    world.catch_up()
    await world.send()
    assert world.retry_seconds() is None


async def test_a_child_that_is_not_wanted_any_more_is_not_retried(world: World) -> None:
    world.error = Refused("no")
    await world.send()
    assert world.applier.retry_seconds([config_map("ns", "another")]) is None


@pytest.mark.parametrize("informed", [True, False])
@pytest.mark.parametrize(
    ("manifest", "words"),
    [
        (config_map("ns", "x-plan", parent=""), "has no controller"),
        (config_map("ns", "x-plan", parent="other"), "has no controller"),
        (owned(config_map("ns", "x-plan"), "rs", "web", kind="ReplicaSet"), 'is controlled by ReplicaSet "web"'),
        (owned(config_map("ns", "x-plan"), "sdd", "other"), f'is controlled by {KIND} "other"'),
    ],
)
async def test_an_object_of_others_is_never_written(
    world: World, informed: bool, manifest: dict[str, Any], words: str
) -> None:
    world.put(manifest)
    if informed:
        world.catch_up()
    for _ in range(3):
        problem = await world.send()
        assert (problem.reason, problem.kind, problem.name) == ("NotOwned", "ConfigMap", "x-plan")
        assert f'ConfigMap "x-plan" exists already and {words}' in problem.message
        assert f'rename the {KIND} "x", or delete the ConfigMap' in problem.message
    assert world.requests == ([] if CHILD in world.seen else ["get"])
    assert world.objects["x-plan"]["metadata"]["uid"] == "theirs"


async def test_an_orphan_is_adopted(world: World, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    world.put(config_map("ns", "x-plan"))
    world.catch_up()
    assert await world.send() is None
    assert world.options == [{"force": True, "uid": "theirs"}]
    assert "is adopted" in caplog.text


@pytest.mark.parametrize("deleting", [True, False])
async def test_a_child_of_a_predecessor_is_waited_for(world: World, deleting: bool) -> None:
    manifest = owned(config_map("ns", "x-plan"), "me" if deleting else "predecessor")
    if deleting:
        manifest["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    world.put(manifest)
    world.catch_up()
    problem = await world.send()
    assert problem.reason == "Unavailable"
    assert "is still being deleted" in problem.message
    assert world.requests == []
    world.objects.clear()
    world.catch_up()
    assert await world.send() is None, "its end is acted on at once"


@pytest.mark.parametrize(
    ("error", "reason"),
    [(Refused("patch: quota", "quota"), "Refused"), (Unavailable("patch: webhook", "webhook"), "Unavailable")],
)
async def test_a_failure_backs_off_and_a_new_manifest_ends_that(world: World, error: ClusterError, reason: str) -> None:
    world.error = error
    waited = []
    for _ in range(8):
        problem = await world.send()
        assert (problem.reason, problem.message) == (reason, error.sentence)
        sent = len(world.requests)
        seconds = world.retry_seconds()
        world.now += seconds - 0.01
        assert await world.send() == problem, "the problem is reported meanwhile"
        assert len(world.requests) == sent
        world.now += 0.01
        waited.append(round(seconds))
    assert waited == [1, 2, 4, 8, 16, 32, 60, 60]
    await world.send()
    sent = len(world.requests)
    await world.send(a="other")
    assert len(world.requests) > sent
    assert world.retry_seconds() == 1
    world.error, world.now = None, world.now + 1
    assert await world.send(a="other") is None
    world.catch_up()
    await world.send(a="other")
    assert world.retry_seconds() is None


async def test_a_process_that_is_not_the_leader_fails_loudly(world: World) -> None:
    world.error = NotLeader("no")
    with pytest.raises(NotLeader):
        await world.send()


async def test_a_new_process_applies_each_child_once(world: World) -> None:
    await world.send(a="1")
    world.catch_up()
    world.applier = world.restarted()
    world.requests.clear()
    for _ in range(3):
        await world.send(a="1")
        world.catch_up()
    assert world.requests == ["apply"]


async def test_children_are_settled_while_the_informer_shows_what_was_applied(world: World) -> None:
    names = ["x", "x-plan"]
    assert world.applier.is_settled(KEY, names), "nothing was applied"
    await world.send(a="1")
    assert not world.applier.is_settled(KEY, names), "the informer lags"
    world.catch_up()
    assert world.applier.is_settled(KEY, names)
    assert world.applier.is_confirmed([config_map("ns", "x-plan")])
    world.drift()
    assert not world.applier.is_settled(KEY, names)


async def test_a_deleted_or_a_refused_child_is_not_settled(world: World) -> None:
    await world.send()
    world.catch_up()
    world.seen.clear()
    assert not world.applier.is_settled(KEY, ["x-plan"])
    world.catch_up()
    world.error = Refused("no")
    await world.send(a="2")
    assert not world.applier.is_settled(KEY, ["x-plan"])
    assert world.applier.is_settled(KEY, ["x"]), "another child"


class Scaled:
    """API server with one Deployment, of whose replicas it has the owners, by the rules of server-side apply."""

    def __init__(self, replicas: int, *owners: str) -> None:
        self.replicas, self.owners = replicas, set(owners)
        self.scales_to: int | None = None
        """Number that an autoscaler sets once the Deployment was read."""

    async def get(self, kind: object, namespace: str, name: str) -> dict[str, Any]:
        replicas = self.replicas
        if self.scales_to is not None:
            self.replicas, self.owners = self.scales_to, {HPA}
        return {"spec": {"replicas": replicas}}

    async def apply(
        self, manifest: dict[str, Any], *, force: bool, uid: str, manager: str = FIELD_MANAGER
    ) -> dict[str, Any]:
        wanted, others = manifest["spec"].get("replicas"), self.owners - {manager}
        if wanted is None:
            self.replicas, self.owners = self.replicas if others else 1, others
        elif wanted != self.replicas and others and not force:
            raise Conflict(f"conflict with {others}")
        else:
            self.replicas, self.owners = wanted, {manager} | (others if wanted == self.replicas else set())
        return {"metadata": {}}

    async def send(self, **spec: int) -> ChildProblem | None:
        client: Any = self
        record = ChildRecord(kind="Deployment", namespace="ns", name="x", uid="uid", controller_uid="me")
        metadata = {"namespace": "ns", "name": "x"}
        manifest = owned({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata, "spec": spec}, "me")
        return await ChildApplier(client, lambda _: record).apply(manifest, "me")


@pytest.mark.parametrize(
    ("replicas", "owner", "scales_to", "after"),
    [(8, FIELD_MANAGER, None, 8), (8, FIELD_MANAGER, 10, 10), (8, HPA, None, 8), (0, FIELD_MANAGER, None, 1)],
    ids=["kept", "scaled meanwhile", "scaled before", "none"],
)
async def test_replicas_that_leave_the_manifest_keep_their_number(
    replicas: int, owner: str, scales_to: int | None, after: int
) -> None:
    server = Scaled(replicas, owner)
    server.scales_to = scales_to
    assert await server.send() is None
    assert server.replicas == after
    server.scales_to, server.replicas, server.owners = None, 12, {HPA}
    for _ in range(2):
        assert await server.send() is None
    assert server.replicas == 12, "the autoscaler's number stays"
    await server.send(replicas=2)
    assert (server.replicas, server.owners) == (2, {FIELD_MANAGER})
