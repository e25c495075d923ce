"""The operator process: the loop of a deployment, informer caches, status and Events."""
