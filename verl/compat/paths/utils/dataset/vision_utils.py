"""Images of rows under upstream's path."""

from io import BytesIO
from typing import Any

from verl.compat import absent_names

__getattr__ = absent_names(__name__)


def process_image(image: Any, **kwargs: Any) -> Any:
    """An image in RGB, of one that is open, of ``{"bytes": ...}``, or of ``{"image": path}``."""
    from PIL import Image

    if isinstance(image, dict):
        image = BytesIO(image["bytes"]) if image.get("bytes") else image.get("image") or image.get("path")
    if isinstance(image, str):
        image = image.removeprefix("file://")
    return (image if isinstance(image, Image.Image) else Image.open(image)).convert("RGB")
