"""Loading of the stored state, once for each deployment that this process manages."""

from __future__ import annotations

from dataclasses import replace

from specdecode_operator import manifests
from specdecode_operator.controller.pod_status import workload_of
from specdecode_operator.decision.materialise_stage import template_of
from specdecode_operator.kube.client import KubeClient
from specdecode_operator.kube.kinds import WORKLOADS
from specdecode_operator.state.draft_store import DraftStore
from specdecode_operator.state.session import Session
from specdecode_operator.state.store import StateStore
from specdecode_operator.types import Key


async def load_session(store: StateStore, drafts: DraftStore, client: KubeClient, key: Key, uid: str) -> Session:
    """Return the session with the stored state and the stored rollout of drafts.

    If the state was lost, the pod template is read from the running workload, so that the loss does not roll pods. The
    API server is asked, because the informer caches have no templates.

    Raises:
        ClusterError: The API server did not answer.
    """
    session = replace(await store.load(key, uid), drafts=await drafts.load(key, uid))
    if session.stored:
        return session
    workload = await client.get(WORKLOADS, key[0], manifests.worker_name(key[1]))
    template = template_of(workload_of(workload)) if workload else None
    return replace(session, learned=session.learned.model_copy(update={"template": template}))
