"""Whether a weight stream is complete, for samplers whose engine keeps weights in its own form and cannot check."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from verl.errors import RolloutError, suggest
from verl.json_text import read_json
from verl.rollout.model_facts import ModelFacts
from verl.weight_sync import WeightChunk

Shapes = dict[str, tuple[int, ...]]
SHOWN = 3
TIED = "lm_head.weight"
"""Stands on disk or in a stream, or not, where it is tied to the embeddings."""


class StreamCheck:
    """Watches a stream go by.

    Args:
        version: that every chunk must carry.
        shapes: of the weights of the model by name; None where they are not known, then this stream says what they are.
    """

    def __init__(self, version: int, shapes: Shapes | None):
        self._version, self._shapes = version, shapes
        self._arrived: Shapes = {}
        self._has_ended = False

    def watched(self, chunks: Iterable[WeightChunk]) -> Iterator[WeightChunk]:
        """The same chunks; raises `RolloutError` where one cannot belong to the stream."""
        for chunk in chunks:
            if chunk.version != self._version:
                raise RolloutError("a chunk of another version arrived", got=chunk.version, allowed=f"{self._version}")
            for name, tensor in chunk.tensors:
                self._note(name, tuple(tensor.shape))
            self._has_ended = chunk.last
            yield chunk

    def finished(self) -> Shapes:
        """The shapes of all weights, once the stream is complete.

        Raises:
            RolloutError: it was interrupted, or weights are missing.
        """
        where = f"version {self._version}"
        if not self._has_ended:
            raise RolloutError("the stream of weights was interrupted", key=where)
        missing = sorted(set(self._shapes or ()) - set(self._arrived))
        if missing:
            more = ", ..." if len(missing) > SHOWN else ""
            raise RolloutError(
                f"{len(missing)} weights did not arrive: {', '.join(missing[:SHOWN])}{more}",
                key=where,
                fix="Do trainer and sampler load the same model?",
            )
        return self._shapes or self._arrived

    def _note(self, name: str, shape: tuple[int, ...]) -> None:
        if name in self._arrived:
            raise RolloutError("a weight arrived twice", key=name)
        if self._shapes is not None and name not in self._shapes and name != TIED:
            raise RolloutError(
                "the sampler's model has no such weight", key=name, fix=suggest(name, self._shapes, limit=1)
            )
        expected = (self._shapes or {}).get(name, shape)
        if expected != shape:
            raise RolloutError("a weight has another shape in the sampler", key=name, got=shape, allowed=f"{expected}")
        self._arrived[name] = shape


def shapes_on_disk(folder: str | Path) -> Shapes | None:
    """The shapes of the tensors in a folder's safetensors files by name, from their headers; None if there are none."""
    shapes: Shapes = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        with file.open("rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            header = read_json(opened.read(size))
        shapes |= {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
    if ModelFacts.of(folder).is_tied:
        shapes.pop(TIED, None)
    return shapes or None
