"""The operator process and its loops: reconciler, planner, informer caches, status and Events."""
