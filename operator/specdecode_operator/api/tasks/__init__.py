"""Tasks of a deployment, and the drafts that they use."""
