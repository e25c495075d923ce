"""Random quantised matrices whose rows have several scales, as checkpoints store them."""

from __future__ import annotations

import torch

from specdecode_kernels.quantised_linear.reference import Kind, Quantised


def with_groups(kind: Kind, outputs: int, inputs: int, group: int) -> Quantised:
    """Return random levels with scales of groups in fp16, for int4 with zero points too."""
    groups, generator = -(-inputs // group), torch.Generator().manual_seed(3)
    scale = torch.randn(outputs, groups, generator=generator).half()
    if kind == "int4":
        packed = torch.randint(0, 256, (outputs, groups * group // 2), generator=generator, dtype=torch.uint8)
        zero = torch.randint(0, 16, (outputs, groups), generator=generator, dtype=torch.uint8)
        return Quantised(kind, packed, scale, inputs, group, zero)
    levels = torch.randn(outputs, inputs, generator=generator) * 50
    return Quantised(kind, levels.to(torch.int8 if kind == "int8" else torch.float8_e4m3fn), scale, inputs, group)
