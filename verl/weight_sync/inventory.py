"""What a receiver of weights must check: every weight arrives, once, with its shape, in one version.

The inventory is the receiver's list of what it holds. Copying starts before the stream has ended, so a stream that
turns out to be wrong leaves half-new weights behind: the receiver must then refuse to work until a whole one arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch

from verl.errors import RolloutError, suggest
from verl.weight_sync.chunks import WeightChunk, taking

SHOWN = 3


class WeightInventory:
    """The tensors of a model by name; names that share storage (tied weights) count as one.

    Args:
        targets: name -> the tensor that arriving values are for. Aliases of one tensor may all be listed.
        takers: name -> what takes the name and the value of a weight in place of a copy, where it is kept in another
            form; its target is a tensor without memory (``meta``), of the value's shape.
    """

    def __init__(
        self,
        targets: Mapping[str, torch.Tensor],
        takers: Mapping[str, Callable[[str, torch.Tensor], None]] | None = None,
    ):
        self._targets, self._takers = dict(targets), dict(takers or {})
        self.shared: list[tuple[torch.Tensor, int]] = []
        self._foreign: set[int] = set()
        groups: dict[tuple[int, int], str] = {}
        # One owner per storage: whichever alias arrives first fills it, a second must hold the same values.
        self._owner = {
            name: groups.setdefault((t.data_ptr(), t.numel()) if t.numel() and not t.is_meta else (id(t), 0), name)
            for name, t in self._targets.items()
        }

    def receive(self, chunks: Iterable[WeightChunk], version: int, share: bool = False) -> int:
        """Take a whole stream; returns the number of bytes.

        Args:
            share: parameters become the trainer's own, where a chunk holds those (``is_live``): nothing is copied, and
                `shared` lists them with torch's count of their changes.

        Raises:
            RolloutError: an unknown name, another shape, a chunk of another version, missing weights, an interrupted
                stream, or two different values for tied weights. The message names them.
        """
        arrived: set[str] = set()
        num_bytes, ended = 0, False
        self.shared = []
        with taking(chunks) as stream:
            for chunk in stream:
                if chunk.version != version:
                    raise RolloutError("a chunk of another version arrived", got=chunk.version, allowed=f"{version}")
                if ended:
                    raise RolloutError("weights arrived after the last chunk", key=f"version {version}")
                self._receive_chunk(chunk, arrived, share and chunk.is_live)
                num_bytes += chunk.num_bytes
                ended = chunk.last
                del chunk  # or the sender would hold two buckets: this one, and the one it fills next
        if not ended:
            raise RolloutError("the stream of weights was interrupted", key=f"version {version}")
        missing = sorted(set(self._owner.values()) - arrived)
        if missing:
            more = ", ..." if len(missing) > SHOWN else ""
            raise RolloutError(
                f"{len(missing)} weights did not arrive: {', '.join(missing[:SHOWN])}{more}",
                key=f"version {version}",
                fix="Do trainer and sampler load the same model?",
            )
        return num_bytes

    @torch.no_grad()
    def _receive_chunk(self, chunk: WeightChunk, arrived: set[str], share: bool) -> None:
        for name, value in chunk.tensors:
            target = self._targets.get(name)
            if target is None:
                raise RolloutError(
                    "the sampler's model has no such weight", key=name, fix=suggest(name, self._targets, limit=1)
                )
            if target.shape != value.shape:
                raise RolloutError(
                    "a weight has another shape in the sampler",
                    key=name,
                    got=tuple(value.shape),
                    allowed=f"{tuple(target.shape)}",
                )
        for name, value in chunk.tensors:
            target, owner = self._targets[name], self._owner[name]
            if owner in arrived:
                self._check_tied(name, target, value)
                continue
            if name in self._takers:
                self._takers[name](name, value)
            elif share and can_share(target, value):
                target.data = value
                self.shared.append((value, value._version))
                self._foreign.add(value.data_ptr())
            else:
                if target.data_ptr() in self._foreign:  # the trainer's, from an earlier stream
                    target.data = torch.empty_like(target)
                copy_into(name, target, value)
            arrived.add(owner)

    def _check_tied(self, name: str, target: torch.Tensor, value: torch.Tensor) -> None:
        if value.data_ptr() != target.data_ptr() and not torch.equal(target, value.to(target)):
            raise RolloutError(
                "this weight is tied to another one in the sampler, and the two arrived with different values (or one "
                "arrived twice)",
                key=name,
                fix="Set tie_word_embeddings in the sampler's model as in the trainer's.",
            )


def can_share(target: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether a parameter may have this value's memory."""
    alike = (target.dtype, target.device, target.stride()) == (value.dtype, value.device, value.stride())
    return alike and isinstance(target, torch.nn.Parameter)  # of a view, others would keep the memory


def copy_into(name: str, target: torch.Tensor, value: torch.Tensor) -> None:
    """Copy across dtypes and devices; nothing to do where both are the same memory already."""
    if value.data_ptr() != target.data_ptr() or value.device != target.device:
        target.copy_(value)
