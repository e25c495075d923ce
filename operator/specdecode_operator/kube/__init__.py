"""Access to the Kubernetes API."""
