"""The packet filter: remove exactly what kube-proxy, the kubelet and the CNI plugins put there.

They all mark their own: chains named KUBE-* and CNI-*, and rules that jump there or carry their comment. What
belongs to others in the same tables (a container engine's NAT, an administrator's rules) is never touched,
and a table goes only if it was not there before and holds nothing any more.
"""

from __future__ import annotations

import json
import re

from localcluster.shell import run, which

_OUR_CHAINS = "KUBE-|CNI-"


def tables() -> list[str]:
    """Names of all nftables tables, as 'family name'."""
    if which("nft") is None:
        return []
    listed = json.loads(run(["nft", "-j", "list", "tables"]))["nftables"]
    found = [item["table"] for item in listed if "table" in item]
    return sorted(f"{table['family']} {table['name']}" for table in found)


def clean(tables_before: list[str]) -> None:
    """Take our rules and chains out of iptables, then the tables that only we had made."""
    for family in ("iptables", "ip6tables"):
        script = removal_script(run([f"{family}-save"]))
        if script:
            run([f"{family}-restore", "--noflush"], stdin=script)
    for table in tables():
        if table not in tables_before and not _has_rules(table):
            run(["nft", "delete", "table", *table.split(" ", 1)])


def remove_network(network: str) -> None:
    """Take the NAT rules and chains of one CNI network out of iptables."""
    script = network_removal_script(run(["iptables-save", "-t", "nat"]), network)
    if script:
        run(["iptables-restore", "--noflush"], stdin=script)


def network_removal_script(saved: str, network: str) -> str:
    """Return input for iptables-restore --noflush that deletes what the bridge plugin made for one network.

    The plugin gives every pod a rule in POSTROUTING and a chain, and names the network in a comment of both.
    """
    mark = f'--comment "name: \\"{network}\\" '
    rules = [line for line in saved.splitlines() if line.startswith("-A POSTROUTING ") and mark in line]
    if not rules:
        return ""
    chains = [line.split()[-1] for line in rules]
    steps = [*("-D" + rule.removeprefix("-A") for rule in rules), *(f"-F {name}" for name in chains)]
    return "\n".join(["*nat", *steps, *(f"-X {name}" for name in chains), "COMMIT"]) + "\n"


def removal_script(saved: str, ours: str = _OUR_CHAINS) -> str:
    """Input for iptables-restore --noflush that deletes what is ours in the output of iptables-save.

    Rules in foreign chains first, then our chains emptied, then dropped: no moment has a jump to nowhere. `ours` is a
    pattern of the beginnings of our chains' names.
    """
    script: list[str] = []
    our_chain = re.compile(rf"(?:{ours})")
    table, chains, rules = "", [""], [""]
    for line in saved.splitlines():
        if line.startswith("*"):
            table, chains, rules = line, [], []
        elif line.startswith(":") and our_chain.match(line[1:]):
            chains.append(line[1:].split()[0])
        elif line.startswith("-A ") and _is_our_rule(line, ours):
            rules.append("-D" + line.removeprefix("-A"))
        elif line == "COMMIT" and chains + rules:
            empty = [f"-F {chain}" for chain in chains]
            drop = [f"-X {chain}" for chain in chains]
            script += [table, *rules, *empty, *drop, "COMMIT"]
    return "".join(line + "\n" for line in script)


def _is_our_rule(line: str, ours: str) -> bool:
    """A rule of a foreign chain that leads into one of ours; rules inside ours go with their chain."""
    return not re.match(ours, line.removeprefix("-A ")) and re.search(f" (?:-j|-g) (?:{ours})", line) is not None


def _has_rules(table: str) -> bool:
    listed = json.loads(run(["nft", "-j", "list", "table", *table.split(" ", 1)]))["nftables"]
    return any("rule" in item for item in listed)
