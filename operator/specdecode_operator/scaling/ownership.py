"""Hand-over of the replicas between the operator and spec.replicas, without a change of the running number."""

from __future__ import annotations

from specdecode_operator.state.learned import ScalingState


def take_over(
    state: ScalingState,
    *,
    spec_replicas: int,
    running: int | None,
    is_owner: bool,
    is_spec_observed: bool,
) -> ScalingState:
    """Return ``state`` with the replicas that the next decision starts from.

    The running number stays until the owner changes it. With an external owner, or without ``spec.scaling``, that is
    a change of spec.replicas: a value that was written before the operator scaled is not followed.

    Args:
        state: State after the previous decision; its defaults if there was none or it was lost.
        spec_replicas: spec.replicas of the deployment.
        running: Replicas of the child Deployment. None if there is none yet.
        is_owner: The operator sets the replicas.
        is_spec_observed: Status was written for this spec, so spec.replicas has not changed since.
    """
    if state.replicas is None or state.spec_replicas is None:
        replicas = _without_state(state, spec_replicas, running, is_owner=is_owner, is_spec_observed=is_spec_observed)
    elif not is_owner and spec_replicas != state.spec_replicas:
        replicas = spec_replicas
    else:
        replicas = state.replicas
    if is_owner != state.owned:
        state = ScalingState()
    return state.model_copy(update={"replicas": replicas, "spec_replicas": spec_replicas, "owned": is_owner})


def _without_state(
    state: ScalingState, spec_replicas: int, running: int | None, *, is_owner: bool, is_spec_observed: bool
) -> int:
    """Return the replicas of a new deployment, or of one whose state was lost or written by an older version.

    A changed spec may be a scaling by its owner, so spec.replicas is followed then.
    """
    if is_owner:
        known = spec_replicas if state.replicas is None else state.replicas
        return known if running is None else running
    return spec_replicas if running is None or not is_spec_observed else running
