"""Files of drafts on the node: a head with noise on its weights, and a claim that workers and Jobs mount."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from harness.kube import Namespace
from kube import Cluster

from specdecode_worker.models.checkpoints.model_store import resolve

GOOD_URI = "embedded://smollm2-135m-instruct-eagle3"


def write_noised_head(head: Path, amount: float = 0.5) -> None:
    """Write the embedded head with noise of ``amount`` standard deviations on every weight. All users may read it."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(resolve(GOOD_URI), head)
    (path,) = head.glob("*.safetensors")
    generator = torch.Generator().manual_seed(1)
    tensors = {name: _with_noise(tensor, generator, amount) for name, tensor in load_file(path).items()}
    for entry in (head.parent, head, *head.iterdir()):
        entry.chmod(0o755 if entry.is_dir() else 0o644)
    save_file(tensors, path)
    path.chmod(0o644)


def _with_noise(tensor: Any, generator: Any, amount: float) -> Any:
    import torch

    if not tensor.is_floating_point():
        return tensor
    return tensor + amount * tensor.std() * torch.randn(tensor.shape, generator=generator).to(tensor.dtype)


def bind_claim(namespace: Namespace, claim: str, folder: Path) -> str:
    """Create a claim whose volume is a folder of this machine, writable for every user. Return the volume's name."""
    assert namespace.cluster.local, "the folder lies on this machine"
    folder.chmod(0o777)
    volume = f"{namespace.name}-{claim}"
    size = {"storage": "4Gi"}
    namespace.cluster.apply(
        {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": volume},
            "spec": {
                "capacity": size,
                "accessModes": ["ReadWriteMany"],
                "persistentVolumeReclaimPolicy": "Retain",
                "storageClassName": "",
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
            "spec": {
                "accessModes": ["ReadWriteMany"],
                "storageClassName": "",
                "volumeName": volume,
                "resources": {"requests": size},
            },
        }
    )
    return volume


def delete_claim(cluster: Cluster, namespace: Namespace, claim: str, volume: str) -> None:
    """Delete a claim and its volume. The folder stays."""
    namespace.kubectl("delete", "pvc", claim, "--wait=false", "--ignore-not-found")
    cluster.kubectl("delete", "pv", volume, "--wait=false", "--ignore-not-found")
