"""``kubectl specdecode``: show what each deployment does and why. Needs neither torch nor kopf.

``cli`` reads the command line and ``api`` talks to the API server with the user's own kubeconfig. The other modules
format what was read, and are pure.
"""
