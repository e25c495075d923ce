"""Files of drafts on the node: a head with noise on its weights, and a claim that workers and Jobs mount."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from specdecode_worker.models.fetch import resolve
from support.e2e.kube import Namespace

TARGET_URI = "embedded://smollm2-135m-instruct"
GOOD_URI = f"{TARGET_URI}-eagle3"


def write_noised_head(head: Path, amount: float = 0.5) -> None:
    """Write the embedded head with noise of ``amount`` standard deviations on every weight. All users may read it."""
    import torch

    generator = torch.Generator().manual_seed(1)

    def noised(tensor: Any) -> Any:
        if not tensor.is_floating_point():
            return tensor
        return tensor + amount * tensor.std() * torch.randn(tensor.shape, generator=generator).to(tensor.dtype)

    _write_head(head, lambda tensors: {name: noised(tensor) for name, tensor in tensors.items()})


def write_head_without_tables(head: Path) -> None:
    """Write the embedded head as one that does not know tables: the output rows of their tokens are noise."""
    import torch
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(resolve(TARGET_URI) / "tokenizer.json"))
    generator = torch.Generator().manual_seed(1)

    def without_tables(tensors: dict[str, Any]) -> dict[str, Any]:
        targets = (torch.arange(len(tensors["d2t"])) + tensors["d2t"]).tolist()
        rows = [row for row, token in enumerate(targets) if _is_of_tables(tokenizer.decode([token]))]
        weight = tensors["lm_head.weight"].float()
        noise = torch.randn((len(rows), weight.shape[1]), generator=generator)
        weight[rows] = 0.3 * weight.std() * noise
        return {**tensors, "lm_head.weight": weight.to(tensors["lm_head.weight"].dtype)}

    _write_head(head, without_tables)


def _is_of_tables(text: str) -> bool:
    return "|" in text or "---" in text or not text.strip()


def _write_head(head: Path, changed: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Write the embedded head with other tensors."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(resolve(GOOD_URI), head)
    (path,) = head.glob("*.safetensors")
    tensors = changed(load_file(path))
    for entry in (head.parent, head, *head.iterdir()):
        entry.chmod(0o755 if entry.is_dir() else 0o644)
    save_file(tensors, path)
    path.chmod(0o644)


@contextmanager
def bound_claim(namespace: Namespace, claim: str, folder: Path) -> Iterator[None]:
    """Bind a claim to a folder of this machine, writable for every user, while a block runs. The folder stays."""
    assert namespace.cluster.local, "the folder lies on this machine"
    for parent in (folder.parent, folder.parent.parent):
        parent.chmod(0o755)
    folder.chmod(0o777)
    volume, size = f"{namespace.name}-{claim}", {"storage": "4Gi"}
    common = {"accessModes": ["ReadWriteMany"], "storageClassName": ""}
    namespace.cluster.apply(
        {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": volume},
            "spec": {
                **common,
                "capacity": size,
                "persistentVolumeReclaimPolicy": "Retain",
                "hostPath": {"path": str(folder), "type": "Directory"},
                "claimRef": {"namespace": namespace.name, "name": claim},
            },
        }
    )
    namespace.apply(
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": claim},
            "spec": {**common, "volumeName": volume, "resources": {"requests": size}},
        }
    )
    try:
        yield
    finally:
        namespace.kubectl("delete", "pvc", claim, "--wait=false", "--ignore-not-found")
        namespace.cluster.kubectl("delete", "pv", volume, "--wait=false", "--ignore-not-found")
