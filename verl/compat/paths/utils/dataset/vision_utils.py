"""Images of rows under upstream's path."""

from typing import Any

from verl.compat import absent_names
from verl.data.vision.images import ImageLimits, load_image

__getattr__ = absent_names(__name__)


def process_image(image: Any, **kwargs: Any) -> Any:
    """An image in RGB, in any form that rows have, within its own ``min_pixels`` and ``max_pixels``.

    Args:
        kwargs: without effect: the model's processor knows the size of its patches.
    """
    return load_image(image, "image", ImageLimits())
