"""Pictures of samples."""

from __future__ import annotations

import io

from PIL import Image


def red() -> bytes:
    """A red picture of 56 x 28 pixels, as PNG."""
    file = io.BytesIO()
    Image.new("RGB", (56, 28), "red").save(file, "PNG")
    return file.getvalue()
