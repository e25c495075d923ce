"""A real one-node Kubernetes on this machine, from the commands in the folder above.

Reading order: `lifecycle` (what up and down do, in order), then `binaries`, `certificates`, `host`,
`control_plane`, `node`, `images`. Standard library only: this runs before any venv exists.
"""
