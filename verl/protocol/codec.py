"""Values of a batch as JSON plus raw bytes: the one encoding under the wire format and the files.

Plain JSON values stay readable JSON. What JSON cannot hold becomes a tagged object ``{"$": [tag, ...]}`` that
points into blobs of raw bytes: numbers in arrays and tensors, bytes, images. Nothing in it names code, so reading it
cannot run any. Types are kept exactly: True stays a bool, a tuple a tuple, ``np.float32(1)`` a numpy scalar.

Tensors, dicts of tensors and images that several values share, as the samples of a prompt share its images, are written
once and are one object again when read.
"""

from __future__ import annotations

import io
import json
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import torch

from verl.errors import DataError

DTYPE_CODES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.int64: "I64",
    torch.uint64: "U64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
}
DTYPES = {code: dtype for dtype, code in DTYPE_CODES.items()}
ARRAY_KINDS = "biufcSUmM"
PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")
RAW_MODES = ("1", "L", "LA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "HSV", "LAB", "I", "F", "I;16")
TAG = "$"
LARGE_BLOB = 1 << 16
PACKED_LENGTH = 16
"""A list of at least this many ints or floats (token ids, log-probs) is packed into bytes."""
ALIGNMENT = 16


class Refused(Exception):
    """A value that has no encoding; ``path`` says where inside the row it is."""

    def __init__(self, reason: str):
        super().__init__(reason)
        self.reason, self.path = reason, ""

    def inside(self, step: Any) -> Refused:
        self.path = f"[{step!r}]{self.path}"
        return self


def tensor_bytes(tensor: torch.Tensor) -> np.ndarray:
    """The tensor's numbers as a flat uint8 array; no copy for a contiguous tensor on the CPU."""
    flat = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    if flat.numel() < 2:  # contiguous with any stride, and a view of bytes needs a stride of 1
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8).numpy()


def tensor_from_bytes(raw: np.ndarray, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """The reverse, sharing memory with ``raw``: read-only memory gives a tensor that must not be written to."""
    if raw.size == 0:
        if math.prod(shape):
            raise ValueError(f"no bytes for a tensor of shape {shape}")
        return torch.empty(tuple(shape), dtype=dtype)
    if not raw.flags.writeable:
        raw = _writable_view(raw)
    return torch.from_numpy(raw).view(dtype).reshape(tuple(shape))


def _writable_view(raw: np.ndarray) -> np.ndarray:
    """The same memory without the read-only flag, which torch cannot express and would warn about."""
    interface = dict(raw.__array_interface__, data=(raw.__array_interface__["data"][0], False))
    return np.asarray(_Memory(interface, raw))


class _Memory:
    """Memory under numpy's array interface; ``owner`` keeps it alive."""

    def __init__(self, interface: dict[str, Any], owner: np.ndarray):
        self.__array_interface__ = interface
        self.owner = owner


def array_bytes(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


class Encoder:
    """Encodes values; afterwards ``blobs()`` are the raw bytes that the JSON points into.

    Args:
        images: ``png`` for files, ``raw`` pixels for the wire, where time matters and size does not.
    """

    def __init__(self, images: Literal["png", "raw"] = "png"):
        self.images = images
        self._small = bytearray()
        self._large: list[np.ndarray] = []
        self._shared: dict[int, tuple[Any, Any]] = {}  # by identity; the object is kept, or its id could come again
        self._by_type: dict[type, Callable[[Any], Any]] = {
            bool: _same,
            int: _same,
            str: _same,
            type(None): _same,
            float: _float,
            list: self._list,
            tuple: lambda value: {TAG: ["tuple", self._items(value)]},
            dict: self._dict,
            bytes: lambda value: {TAG: ["bytes", self.blob(np.frombuffer(value, np.uint8))]},
            bytearray: lambda value: {TAG: ["bytearray", self.blob(np.frombuffer(value, np.uint8))]},
            torch.Tensor: self._tensor,
            np.ndarray: self._array,
        }

    def blobs(self) -> list[np.ndarray]:
        """Number 0 holds all small pieces, the others are one large piece each."""
        return [np.frombuffer(bytes(self._small), np.uint8), *self._large]

    def blob(self, raw: np.ndarray) -> list[int]:
        """Store raw bytes; returns [blob number, start, length]."""
        if raw.size >= LARGE_BLOB:
            self._large.append(raw)
            return [len(self._large), 0, raw.size]
        self._small += b"\0" * (-len(self._small) % ALIGNMENT)
        start = len(self._small)
        self._small += raw.tobytes()
        return [0, start, raw.size]

    def encode(self, value: object) -> Any:
        """The JSON form of one value; raises `Refused`."""
        encode = self._by_type.get(type(value))
        if encode is not None:
            return encode(value)
        if isinstance(value, np.generic):
            return {TAG: ["scalar", *self._raw_array(np.asarray(value))]}
        image_module = sys.modules.get("PIL.Image")  # a value can be an image only if its module is loaded
        if image_module is not None and isinstance(value, image_module.Image):
            return self._image(value)
        raise Refused(f"values of type {type(value).__module__}.{type(value).__qualname__} cannot be written")

    def column(self, array: np.ndarray) -> Any:
        """A column of a batch; a `Refused` names the row."""
        if array.dtype == object:
            return {TAG: ["objects", list(array.shape), self._items(array.ravel().tolist())]}
        return self._array(array)

    def _items(self, values: Sequence[Any]) -> list[Any]:
        items = []
        try:
            for value in values:
                items.append(self.encode(value))
        except Refused as refused:
            raise refused.inside(len(items)) from None
        except RecursionError:
            raise Refused("values nested this deeply cannot be written") from None
        return items

    def _list(self, values: list[Any]) -> Any:
        if len(values) >= PACKED_LENGTH:
            kinds = set(map(type, values))
            if kinds == {float}:
                return {TAG: ["floats", self.blob(array_bytes(np.array(values, np.float64)))]}
            if kinds == {int} and min(values) >= -(1 << 63) and max(values) < 1 << 63:
                return {TAG: ["ints", self.blob(array_bytes(np.array(values, np.int64)))]}
        return self._items(values)

    def _dict(self, values: dict[Any, Any]) -> Any:
        if values and all(type(value) is torch.Tensor for value in values.values()):
            return self._once(values, self._numbered)
        return self._entries(values)

    def _numbered(self, values: dict[Any, Any]) -> Any:
        return {TAG: ["tensors", len(self._shared), self._entries(values)]}

    def _entries(self, values: dict[Any, Any]) -> Any:
        plain = TAG not in values and all(type(key) is str for key in values)
        encoded, key = {}, None
        try:
            for key, value in values.items():
                encoded[key] = self.encode(value)
        except Refused as refused:
            raise refused.inside(key) from None
        if plain:
            return encoded
        return {TAG: ["dict", [[self.encode(key), value] for key, value in encoded.items()]]}

    def _once(self, value: Any, encode: Callable[[Any], Any]) -> Any:
        """The encoding of an object that may come again, whose bytes are stored when it first comes."""
        cached = self._shared.get(id(value))
        if cached is None:
            cached = self._shared[id(value)] = (value, encode(value))
        return cached[1]

    def _tensor(self, tensor: torch.Tensor) -> Any:
        return self._once(tensor, self._tensor_bytes)

    def _tensor_bytes(self, tensor: torch.Tensor) -> Any:
        code = DTYPE_CODES.get(tensor.dtype)
        if code is None or tensor.layout != torch.strided or tensor.is_quantized:
            raise Refused(f"tensors of {tensor.dtype}, {tensor.layout} cannot be written")
        return {TAG: ["tensor", code, list(tensor.shape), self.blob(tensor_bytes(tensor))]}

    def _raw_array(self, array: np.ndarray) -> tuple[str, list[int], list[int]]:
        if array.dtype.kind not in ARRAY_KINDS:
            raise Refused(f"numpy values of dtype {array.dtype} cannot be written")
        return array.dtype.str, list(array.shape), self.blob(array_bytes(array))

    def _array(self, array: np.ndarray) -> Any:
        if array.dtype == object:
            return self.column(array)
        return {TAG: ["array", *self._raw_array(array)]}

    def _image(self, image: Any) -> Any:
        return self._once(image, self._pixels)

    def _pixels(self, image: Any) -> Any:
        allowed = PNG_MODES if self.images == "png" else RAW_MODES
        if image.mode not in allowed:
            raise Refused(f"images of mode {image.mode!r} cannot be written (convert('RGB') first)")
        if self.images == "raw":
            raw = np.frombuffer(image.tobytes(), np.uint8)
            return {TAG: ["image", image.mode, list(image.size), self.blob(raw)]}
        file = io.BytesIO()
        image.save(file, format="PNG")
        return {TAG: ["png", self.blob(np.frombuffer(file.getvalue(), np.uint8))]}


class Decoder:
    """Reads what `Encoder` wrote; a reference outside the blobs or an unknown tag is a `DataError`.

    Args:
        max_pixels: of all images together, checked before any is decoded; Pillow has a limit for each PNG as well.
    """

    def __init__(self, blobs: Sequence[np.ndarray], max_pixels: float = math.inf):
        self._blobs, self._pixels_left = blobs, max_pixels
        self._shared: dict[str, Any] = {}
        self._by_tag: dict[str, Callable[..., Any]] = {
            "float": float,
            "tuple": tuple,
            "dict": dict,
            "bytes": lambda at: self._raw(at).tobytes(),
            "bytearray": lambda at: bytearray(self._raw(at).tobytes()),
            "floats": lambda at: np.frombuffer(self._raw(at), np.float64).tolist(),
            "ints": lambda at: np.frombuffer(self._raw(at), np.int64).tolist(),
            "array": self._array,
            "scalar": lambda dtype, shape, at: self._array(dtype, [], at)[()],
            "objects": _objects,
            "tensors": lambda number, values: self._shared.setdefault(f"tensors {number}", values),
            "tensor": self._once(lambda code, shape, at: tensor_from_bytes(self._own(at), DTYPES[code], shape)),
            "png": self._once(self._png),
            "image": self._once(self._image),
        }

    def decode(self, text: bytes | str) -> Any:
        try:
            return json.loads(text, object_hook=self._hook)
        except (ValueError, LookupError, TypeError, OverflowError, RuntimeError, OSError) as error:
            raise DataError(f"damaged batch data ({type(error).__name__}: {error})") from error

    def _hook(self, mapping: dict[str, Any]) -> Any:
        if TAG not in mapping:
            return mapping
        tag, *rest = mapping[TAG]
        if tag not in self._by_tag:
            raise DataError("unknown kind of value in batch data", got=tag, fix="Was it written by a newer version?")
        return self._by_tag[tag](*rest)

    def _once(self, read: Callable[..., Any]) -> Callable[..., Any]:
        """Reads a value that several share when it first comes; equal references are one object."""

        def shared(*parts: Any) -> Any:
            key = f"{id(read)} {parts}"
            if key not in self._shared:
                self._shared[key] = read(*parts)
            return self._shared[key]

        return shared

    def _raw(self, at: Sequence[int]) -> np.ndarray:
        number, start, length = at
        blob = self._blobs[number]
        if start < 0 or length < 0 or number < 0 or start + length > blob.size:
            raise IndexError(f"bytes {start} to {start + length} of {blob.size}")
        return blob[start : start + length]

    def _own(self, at: Sequence[int]) -> np.ndarray:
        """Small pieces are copied (they share one blob); a large piece is a view."""
        raw = self._raw(at)
        return raw.copy() if at[0] == 0 else raw

    def _array(self, dtype: str, shape: list[int], at: Sequence[int]) -> np.ndarray:
        kind = np.dtype(dtype)
        if kind.kind not in ARRAY_KINDS:
            raise ValueError(f"dtype {dtype}")
        return self._own(at).view(kind).reshape(shape)

    def _png(self, at: Sequence[int]) -> Any:
        from PIL import Image

        try:
            image = Image.open(io.BytesIO(self._raw(at).tobytes()), formats=["PNG"])
            self._take_pixels(*image.size)
            return image.copy()  # a plain image, without the open file
        except (SyntaxError, Image.DecompressionBombError) as error:  # what PIL raises for a broken or monstrous PNG
            raise ValueError(str(error)) from error

    def _image(self, mode: str, size: tuple[int, int], at: Sequence[int]) -> Any:
        from PIL import Image

        width, height = size
        self._take_pixels(width, height)
        return Image.frombytes(mode, (width, height), self._raw(at).tobytes())

    def _take_pixels(self, width: int, height: int) -> None:
        self._pixels_left -= width * height
        if self._pixels_left < 0:
            raise ValueError(f"an image of {width} x {height} pixels, with which the images have too many")


def _same(value: Any) -> Any:
    return value


def _float(value: float) -> Any:
    return value if math.isfinite(value) else {TAG: ["float", repr(value)]}


def _objects(shape: list[int], values: list[Any]) -> np.ndarray:
    array = np.empty(len(values), dtype=object)
    for index, value in enumerate(values):
        array[index] = value
    return array.reshape(shape)
