"""Names of dtypes under upstream's path."""

from typing import Any

import torch

from verl.device import DTYPES, torch_dtype


class PrecisionType:
    """``"bf16"``, ``"bfloat16"``, 16, ``torch.bfloat16`` and the like as torch's dtypes."""

    HALF, FLOAT, FULL, BFLOAT, MIXED = "16", "32", "64", "bf16", "mixed"

    @staticmethod
    def supported_type(precision: Any) -> bool:
        return precision in (16, 32, *DTYPES, *DTYPES.values())

    @staticmethod
    def to_dtype(precision: Any) -> torch.dtype:
        return torch_dtype({16: "fp16", 32: "fp32"}.get(precision, precision))

    @staticmethod
    def to_str(precision: torch.dtype) -> str:
        """``fp16``, ``fp32`` or ``bf16``."""
        return next(name for name in ("fp16", "fp32", "bf16") if DTYPES[name] == precision)

    @staticmethod
    def is_fp16(precision: Any) -> bool:
        return PrecisionType.to_dtype(precision) == torch.float16

    @staticmethod
    def is_fp32(precision: Any) -> bool:
        return PrecisionType.to_dtype(precision) == torch.float32

    @staticmethod
    def is_bf16(precision: Any) -> bool:
        return PrecisionType.to_dtype(precision) == torch.bfloat16
