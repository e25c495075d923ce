"""``kubectl specdecode``: what every deployment does and why, for the person on call. No torch, no kopf.

``cli`` reads the command line, ``api`` speaks to the API server with the user's own kubeconfig, the rest turns what
was read into text and is pure.
"""
