"""Images in every form that rows have, and those that are refused."""

from __future__ import annotations

import base64
import io
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from verl.data.vision.images import ImageLimits, describe_image, fitted_size, load_image, open_image
from verl.errors import DataError

LIMITS = ImageLimits()


def png(colour: tuple[int, int, int] = (10, 20, 30), size: tuple[int, int] = (6, 4)) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", size, colour).save(out, format="PNG")
    return out.getvalue()


def test_every_form_of_an_image_gives_the_same_pixels(tmp_path):
    file = tmp_path / "a.png"
    file.write_bytes(png())
    url = "data:image/png;base64," + base64.b64encode(png()).decode()
    forms = [
        png(), {"bytes": png(), "path": "gone.png"}, {"bytes": None, "path": str(file)}, str(file), Path(file),
        f"file://{file}", {"image": str(file)}, {"image": {"bytes": png()}}, url, {"image_url": {"url": url}},
        {"type": "image_url", "image_url": url}, Image.open(file), Image.new("RGBA", (6, 4), (10, 20, 30, 255)),
    ]  # fmt: skip
    for form in forms:
        image = load_image(form, "x", LIMITS)
        assert (image.mode, image.size) == ("RGB", (6, 4))
        assert np.asarray(image).reshape(-1, 3).tolist() == [[10, 20, 30]] * 24


def test_transparent_places_become_white():
    image = load_image(Image.new("RGBA", (2, 2), (255, 0, 0, 0)), "x", LIMITS)
    assert np.asarray(image).min() == 255


def test_a_photograph_that_is_stored_on_its_side_is_set_upright():
    exif = Image.Exif()
    exif[0x0112] = 6
    out = io.BytesIO()
    Image.new("RGB", (30, 20)).save(out, format="JPEG", exif=exif)
    assert load_image(out.getvalue(), "x", LIMITS).size == (20, 30)


def test_a_picture_of_16_bits_keeps_its_greys():
    grey = np.full((2, 2), 128 * 256, np.uint16)
    assert np.asarray(load_image(Image.fromarray(grey), "x", LIMITS)).tolist() == [[[128] * 3] * 2] * 2


def test_sizes_are_bounded_by_the_images_own_limits_before_those_of_the_settings():
    limits = ImageLimits(min_pixels=100, max_pixels=400)
    assert load_image(png(size=(40, 40)), "x", limits).size == (20, 20)
    assert load_image({"bytes": png(size=(40, 40)), "max_pixels": 100}, "x", limits).size == (10, 10)
    assert load_image(png(size=(5, 5)), "x", limits).size == (10, 10)
    assert fitted_size((30, 10), None, None) == (30, 10)
    for bad in ({"min_pixels": 0}, {"max_pixels": "9"}, {"min_pixels": 9, "max_pixels": 4}, {"min_pixels": 10**9}):
        with pytest.raises(DataError, match="pixels"):
            load_image({"bytes": png(), **bad}, "x", LIMITS)


def bomb(width: int, height: int) -> bytes:
    """A PNG whose header promises more pixels than it has."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 10)) + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (bomb(10_000, 10_000), "10000 x 10000 pixels, more than data.max_image_pixels=50000000"),
        (bomb(60_000, 60_000), "decompression bomb"),
        (bomb(5000, 10), "one edge is over 200 times the other"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not an image"),
        (b"", "not an image"),
        (png()[:40], "damaged"),
        (bomb(100, 100), "damaged"),
        ("no/such.png", "no such image. Got 'no/such.png'"),
        ("http://example.org/a.png", "set data.allow_remote_images=true"),
        ({"image_url": {"url": "https://example.org/a.png"}}, "images are not fetched from the network"),
        ("data:image/png;base64,@@@", "a data URL that is damaged"),
        ("data:image/png,abc", "not in base64"),
        ({"bytes": None, "path": None}, "without bytes and without a path"),
        (7, "not an image. Got 'int'"),
        (None, "not an image"),
    ],
)
def test_a_hostile_or_broken_image_is_refused_with_its_place(value, words):
    with pytest.raises(DataError) as failure:
        load_image(value, "rows.parquet, row 3, image 0", LIMITS)
    assert words in str(failure.value) and "rows.parquet, row 3, image 0" in str(failure.value)


def test_the_header_is_enough_to_refuse_a_bomb():
    with pytest.raises(DataError, match=r"more than data\.max_image_pixels=10"):
        open_image(png(size=(4, 4)), "x", ImageLimits(decoded=10))


def test_a_digest_tells_pictures_apart():
    red, blue = Image.new("RGB", (56, 28), "red"), Image.new("RGB", (56, 28), "blue")
    assert describe_image(red).startswith("image 56x28 sha256:") and describe_image(red) != describe_image(blue)
    assert describe_image(red) == describe_image(red.copy())
