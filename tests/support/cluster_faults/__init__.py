"""Faults of a cluster: API server and etcd that are gone or slow, and nodes that come and go."""
