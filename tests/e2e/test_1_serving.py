"""`helm test` passes, and has the API server refuse a bad resource."""

from __future__ import annotations

from support.e2e.release import Release


def test_helm_test_sees_a_bad_resource_refused(release: Release) -> None:
    said = release.test()
    assert "min 4, initial 3, max 2: 422" in said
    assert "min 0, initial 3, max 5: 201" in said
