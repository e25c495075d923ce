"""Hub in a pod with the worker's image: serves small models in the layouts of the repositories that the examples name.

The test mounts this file beside the package `support` with what it imports.
"""

from __future__ import annotations

import time

from support.published.hub import StandInHub
from support.published.repositories import repository

PORT = 8080
NAMES = (
    "meta-llama/Llama-3.1-8B-Instruct",
    "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B",
    "RedHatAI/Meta-Llama-3.1-8B-Instruct-FP8",
)
CONFIG = {"max_position_embeddings": 16384}
"""As many positions as the example asks for."""

if __name__ == "__main__":
    with StandInHub(*(repository(name, CONFIG) for name in NAMES), host="0.0.0.0", port=PORT):
        while True:
            time.sleep(60)
