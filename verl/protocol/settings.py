"""Private flags in ``meta_info``, and the one global switch of batches: padding of what does not divide."""

from __future__ import annotations

from verl import env

AUTO_PADDING_KEY = "_verl_auto_padding"
"""The private flag in ``meta_info`` that turns padding on for one batch."""
SHARED_ROWS = "_verl_shared_rows"
"""The private flag of a part that all workers of one data-parallel rank got, instead of rows of their own."""


class _Settings(type):
    _auto_padding: bool | None = None

    @property
    def auto_padding(cls) -> bool:
        """Set here, else the variable VERL_AUTO_PADDING, else off."""
        if _Settings._auto_padding is not None:
            return _Settings._auto_padding
        return env.get_flag("VERL_AUTO_PADDING")

    @auto_padding.setter
    def auto_padding(cls, enabled: bool | None) -> None:
        _Settings._auto_padding = None if enabled is None else bool(enabled)


class DataProtoConfig(metaclass=_Settings):
    """``DataProtoConfig.auto_padding = True`` pads every batch that does not divide; None returns to the variable."""

    auto_padding_key = AUTO_PADDING_KEY
