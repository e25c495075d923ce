"""Checks of a further node's names, addresses and clean-up rules. No cluster needed."""

from __future__ import annotations

import ipaddress
from pathlib import Path

import pytest
from localcluster import certificates, extra_nodes, firewall, leftovers, templates
from localcluster.errors import ClusterError
from localcluster.settings import CNI_NETWORK, NODE_ADDRESS, NODE_NAME, NODE_NETWORK, POD_NETWORK, ExtraNode, Layout
from localcluster.shell import succeeds

NODES = [ExtraNode(f"node-{number}", number) for number in range(1, extra_nodes.MAX_NODES)]

_SAVED = """\
*nat
:PREROUTING ACCEPT [5:300]
:POSTROUTING ACCEPT [5:300]
:CNI-first - [0:0]
:CNI-second - [0:0]
-A POSTROUTING -s 10.244.0.7/32 -m comment --comment "name: \\"specdecode\\" id: \\"aa\\"" -j CNI-first
-A POSTROUTING -s 10.244.1.7/32 -m comment --comment "name: \\"specdecode1\\" id: \\"bb\\"" -j CNI-second
-A CNI-first -d 10.244.0.0/24 -m comment --comment "name: \\"specdecode\\" id: \\"aa\\"" -j ACCEPT
-A CNI-second -d 10.244.1.0/24 -m comment --comment "name: \\"specdecode1\\" id: \\"bb\\"" -j ACCEPT
COMMIT
"""


def test_only_rules_of_one_network_are_removed() -> None:
    """The first node's network has a name that the other names start with."""
    assert firewall.network_removal_script(_SAVED, "specdecode1").splitlines() == [
        "*nat",
        '-D POSTROUTING -s 10.244.1.7/32 -m comment --comment "name: \\"specdecode1\\" id: \\"bb\\"" -j CNI-second',
        "-F CNI-second",
        "-X CNI-second",
        "COMMIT",
    ]
    assert "CNI-second" not in firewall.network_removal_script(_SAVED, "specdecode")
    assert firewall.network_removal_script(_SAVED, "specdecode2") == ""


def test_addresses_and_pod_networks_do_not_meet() -> None:
    addresses = [NODE_ADDRESS, *(node.address for node in NODES)]
    assert len(set(addresses)) == len(addresses)
    assert all(ipaddress.ip_address(address) in ipaddress.ip_network(NODE_NETWORK) for address in addresses)
    networks = [ipaddress.ip_network(network) for network in (POD_NETWORK, *(node.pod_network for node in NODES))]
    assert not any(one.overlaps(other) for one in networks for other in networks if one is not other)


def test_names_on_the_machine_differ_from_those_of_the_first_node() -> None:
    for names in ({"sdpod0", *(n.pod_bridge for n in NODES)}, {CNI_NETWORK, *(n.cni_network for n in NODES)}):
        assert len(names) == len(NODES) + 1
    assert not {node.cgroup for node in NODES} & {"kubepods", "buildkit"}
    assert all(not f"{node.cni_network}-".startswith(f"{CNI_NETWORK}-") for node in NODES), "one glob, one network"


def test_numbers_are_reused_and_records_are_read_back(layout: Layout) -> None:
    first, second = (extra_nodes._record(layout, name) for name in ("one", "two"))
    assert (first.number, second.number) == (1, 2)
    assert extra_nodes._record(layout, "one") == first
    leftovers.wipe(first.layout(layout))
    assert extra_nodes.recorded(layout) == [second]
    assert extra_nodes._record(layout, "three").number == 1


def test_a_record_that_a_full_disk_cut_short_is_written_again(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever reads the records, such as `down`, works meanwhile."""
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", lambda path, text: path.open("w").close() or full())
        with pytest.raises(OSError, match="disk is full"):
            extra_nodes._record(layout, "one")
    assert extra_nodes.recorded(layout) == []
    assert extra_nodes._record(layout, "one").number == 1
    assert [node.name for node in extra_nodes.recorded(layout)] == ["one"]


def full() -> None:
    raise OSError("the disk is full")


def test_certificates_whose_kubeconfigs_are_missing_are_made_again(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full when the first kubeconfig is written."""
    monkeypatch.setattr(certificates, "_make_all", lambda folder: None)
    monkeypatch.setattr(certificates, "_usable", Path.exists)
    with monkeypatch.context() as patch:
        patch.setattr(certificates, "_write_kubeconfig", lambda layout, user: full())
        with pytest.raises(OSError, match="disk is full"):
            certificates.ensure(layout)
    assert certificates.ensure(layout)
    assert layout.kubeconfig.exists()
    assert not certificates.ensure(layout)


@pytest.mark.parametrize("name", ["", "Two", "a b", "../x", "-a", "a" * 31, NODE_NAME])
def test_bad_names_are_refused(layout: Layout, name: str) -> None:
    with pytest.raises(ClusterError, match="cannot name"):
        extra_nodes._record(layout, name)


def test_there_is_an_end_of_nodes(layout: Layout) -> None:
    for node in NODES:
        extra_nodes._record(layout, node.name)
    with pytest.raises(ClusterError, match="remove one"):
        extra_nodes._record(layout, "too-many")


def test_files_of_a_node_name_its_own_paths_and_networks(layout: Layout) -> None:
    node = NODES[0]
    own = node.layout(layout)
    network = {"cni_network": node.cni_network, "pod_bridge": node.pod_bridge, "pod_network": node.pod_network}
    conflist = templates.text(own, "cni/10-specdecode.conflist", **network)
    assert POD_NETWORK not in conflist
    assert node.pod_network in conflist
    kubelet = templates.write(own, "kubelet.yaml", suffix="cgroupRoot: /x\n", node_address=node.address).read_text()
    assert f"unix://{own.state}/containerd/containerd.sock" in kubelet
    assert f"address: {node.address}\n" in kubelet
    assert kubelet.endswith("cgroupRoot: /x\n")


def test_certificates_follow_the_clusters_authority(layout: Layout) -> None:
    """A node's certificates stay as they are until the cluster's authority is another one."""
    own = NODES[0].layout(layout)
    seen = []
    for renewed in (True, False, True):
        if renewed:
            layout.pki.mkdir(parents=True, exist_ok=True)
            certificates._make_authority(layout.pki, "ca")
        certificates.ensure_for_node(layout, own, NODES[0].name, NODES[0].address)
        seen.append((own.pki / "kubelet.crt").read_text())
        verify = ["openssl", "verify", "-CAfile", layout.pki / "ca.crt", own.pki / "kubelet-server.crt"]
        assert succeeds(verify)
        assert f"{own.pki}/kubelet.key" in (own.kubeconfig.parent / "kubelet.conf").read_text()
    assert seen[0] == seen[1] != seen[2]
