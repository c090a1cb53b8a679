"""The base of a section of settings under upstream's path."""

from verl.config import ConfigNode as BaseConfig
