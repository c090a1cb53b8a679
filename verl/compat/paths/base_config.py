"""The base of a section of settings under upstream's path."""

from verl.compat.forms.base_config import BaseConfig
