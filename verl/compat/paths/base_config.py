"""The base of a section of settings under upstream's path."""

from verl.config.by_hand import BaseConfig
