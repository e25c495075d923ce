"""Images that outlive the cluster: moved out before its folder goes, back at the next boot, and gone with their key."""

from __future__ import annotations

from pathlib import Path

import pytest
from localcluster import kept_images
from localcluster.settings import Layout

BLOB = Path("containerd/root/content/blob")
CACHE = Path("buildkit/cache.db")
POD = Path("containerd/root/io.containerd.grpc.v1.cri/sandboxes/pod")


@pytest.fixture
def ended(layout: Layout) -> Layout:
    """Return the folders of a cluster whose processes have ended."""
    for file in (BLOB, CACHE, POD):
        (layout.state / file).parent.mkdir(parents=True)
        (layout.state / file).write_text("x")
    return layout


def test_images_come_back_at_the_next_boot_without_pods(ended: Layout) -> None:
    kept_images.keep(ended)
    assert not (ended.state / BLOB).exists()
    kept_images.restore(ended)
    assert (ended.state / BLOB).exists()
    assert (ended.state / CACHE).exists()
    assert not (ended.state / POD).exists()
    assert not ended.kept_images.exists()


def test_a_cluster_that_has_images_keeps_its_own(ended: Layout) -> None:
    kept_images.keep(ended)
    (ended.state / BLOB).parent.mkdir(parents=True)
    kept_images.restore(ended)
    assert not (ended.state / BLOB).exists()


def test_images_of_other_requirement_files_are_removed(ended: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    kept_images.keep(ended)
    monkeypatch.setattr(kept_images, "key", lambda: "another")
    kept_images.restore(ended)
    assert not (ended.state / BLOB).exists()
    assert not ended.kept_images.exists()


def test_key_follows_the_requirement_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "requirements").mkdir()
    files = [tmp_path / "requirements" / f"{name}.txt" for name in ("build", "worker", "operator", "embedded")]
    monkeypatch.setattr(kept_images, "REPOSITORY", tmp_path)
    keys = set()
    for text in ("a", "b"):
        for file in files:
            file.write_text(text)
            if all(path.exists() for path in files):
                keys.add(kept_images.key())
    assert len(keys) == len(files) + 1
