"""Public names of the config modules: shapes of networks, read from Hugging Face's config.json.

Targets are in `target_config`, draft heads in `draft_config`, rotary scalings in `networks.rope`.
"""

from __future__ import annotations

from specdecode_worker.models.configs.config_fields import read_config
from specdecode_worker.models.configs.dflash_config import DFlashConfig, dflash_config
from specdecode_worker.models.configs.draft_config import (
    Eagle3Config,
    EagleConfig,
    MedusaConfig,
    eagle3_config,
    eagle_config,
    medusa_config,
)
from specdecode_worker.models.configs.peagle_config import PEagleConfig, peagle_config
from specdecode_worker.models.configs.target_config import BlockConfig, LlamaConfig, llama_config
from specdecode_worker.models.networks.rope import LinearScaling, RopeScaling, YarnScaling

__all__ = [
    "BlockConfig",
    "DFlashConfig",
    "Eagle3Config",
    "EagleConfig",
    "LinearScaling",
    "LlamaConfig",
    "MedusaConfig",
    "PEagleConfig",
    "RopeScaling",
    "YarnScaling",
    "dflash_config",
    "eagle3_config",
    "eagle_config",
    "llama_config",
    "medusa_config",
    "peagle_config",
    "read_config",
]
