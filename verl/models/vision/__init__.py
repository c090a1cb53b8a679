"""Models that see: what the processor made of a row's images and videos, for a packed or padded forward pass.

A family says how many tokens an image takes, where these lie on the axes of the rotary embedding, and what its tower is
called with. Engines and samplers know no family.
"""

from verl.models.vision.families import family_of
from verl.models.vision.family import Picture, PlacedPicture, VisionFamily
from verl.models.vision.inputs import VisionInputs, placing
from verl.models.vision.towers import freeze_tower, language_backbone, tower_flops, tower_modules

__all__ = [
    "Picture",
    "PlacedPicture",
    "VisionFamily",
    "VisionInputs",
    "family_of",
    "freeze_tower",
    "language_backbone",
    "placing",
    "tower_flops",
    "tower_modules",
]
