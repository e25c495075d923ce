"""Prints what trees bring over chains by table, sequences and text, for an oracle that knows acceptance and cost.

python benchmarks/tree_gain.py
"""

from __future__ import annotations

from specdecode_operator.api.v1alpha1 import TreeSpec
from specdecode_simulator.policies.oracle import Part, Shapes, Text
from specdecode_simulator.records.acceptance_walks import PLAIN
from specdecode_simulator.records.recordings import library, nearest

TEXTS = {"code": ("code", 0.55), "chat": ("qa", 0.45), "prose": ("prose", -0.3)}
"""Domain and quality of the simulator's kinds of requests."""
CONTEXT = {"smollm2-cpu": 120.0}
SEQUENCES = (1, 2, 4, 8, 16, 32)


def main() -> None:
    """Print one table."""
    found = library(nearest())
    print("| table | sequences | " + " | ".join(f"{text}: tree, chain" for text in TEXTS) + " |")
    print("|---|---|" + "---|" * len(TEXTS))
    for name in ("h200-8b", "plain-engine-8b", "smollm2-cpu"):
        table = found.tables[name]
        for count in SEQUENCES:
            if count > table.sequences[-1]:
                continue
            kv_tokens = count * CONTEXT.get(name, 1500.0)
            cells = []
            for text in TEXTS.values():
                parts = (Part(float(count), (Text(*text),)),)
                gains = []
                for tree in (TreeSpec(), TreeSpec(top_k=1)):
                    shapes = Shapes(found.records, table, tree)
                    (best,) = shapes.best(parts, kv_tokens)
                    gain = shapes.pace(parts, (best,), kv_tokens) / shapes.pace(parts, (PLAIN,), kv_tokens)
                    gains.append(
                        f"{gain:.2f} ({best.depth} deep, {best.nodes} nodes)" if tree.top_k > 1 else f"{gain:.2f}"
                    )
                cells.append(", ".join(gains))
            print(f"| {name} | {count} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
