"""Hub in a pod with the worker's image: serves small models in the layouts of the repositories that the examples name.

The test mounts this file with `published` and `small_model` of tests/support.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from published.hub import StandInHub
from published.repositories import repository

PORT = 8080
NAMES = ("meta-llama/Llama-3.1-8B-Instruct", "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B")
CONFIG = {"max_position_embeddings": 16384}
"""As many positions as the example asks for."""

if __name__ == "__main__":
    with StandInHub(*(repository(name, CONFIG) for name in NAMES), host="0.0.0.0", port=PORT):
        while True:
            time.sleep(60)
