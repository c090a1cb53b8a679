"""The sections of training backends under upstream's path."""

from verl.config import FSDPEngineConfig
from verl.config.schema.role import MegatronEngineConfig as McoreEngineConfig
