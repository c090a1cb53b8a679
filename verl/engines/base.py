"""The seam between the dataflow and a training backend.

A backend owns its iteration (accumulation, or a pipeline schedule) and how weights are laid out; what is common to all
is in this package: alignment of rows (`rows`), micro-batches (`micro_batch`), outputs of a forward pass (`forward`),
clipping and the skip of a non-finite step (`step`), optimizers (`optimizer`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

from torch import Tensor

from verl.algorithms.kl import Measure, full_kl
from verl.algorithms.losses import LossFn
from verl.checkpoint.part import HFWriter
from verl.checkpoint.state import EngineState
from verl.config.schema.role import FSDPEngineConfig, MegatronEngineConfig
from verl.config.schema.torchtitan import TorchTitanEngineConfig
from verl.metrics import MetricSet
from verl.protocol import DataProto
from verl.protocol.tokenizer import Tokenizer

__all__ = ["DataRank", "Engine", "EngineState", "HFWriter"]
T = TypeVar("T")


class DataRank(NamedTuple):
    """A process's place among the data-parallel ranks of an engine.

    Attributes:
        rank, size: which of how many parts of a batch it computes.
        speaks: whether its results are those of that part; the others of the same rank have the same or none.
    """

    rank: int
    size: int
    speaks: bool


class Engine(ABC):
    """One model that can infer and, with an optimizer, train.

    Batches hold ``input_ids`` and ``attention_mask`` (B, P+T), ``responses`` and ``response_mask`` (B, T). B rows, P
    prompt and T response tokens. ``micro_batch_size`` limits the rows of one forward pass, ``max_tokens`` its tokens;
    with neither the engine chooses. Neither changes a result.

    An engine over several processes is called on all of them, in the same order, each with its own rows: every method
    below is then collective, also where a rank has nothing to do.
    """

    device: str
    reference: Any = None
    aligns_rows: ClassVar[bool] = True
    """Whether it reads how rows are laid out in a pass (`PassSettings`), and not only what changes its results."""
    is_alone: ClassVar[bool] = False
    """Whether it holds a model in one process only."""

    @classmethod
    def section(
        cls, fsdp: FSDPEngineConfig, megatron: MegatronEngineConfig, torchtitan: TorchTitanEngineConfig | None = None
    ) -> FSDPEngineConfig | MegatronEngineConfig | TorchTitanEngineConfig:
        """Which of these sections of a role configures this engine."""
        return fsdp

    @property
    def data_rank(self) -> DataRank | None:
        """None where every process is handed rows of its own."""
        return None

    @property
    def is_first(self) -> bool:
        """Whether this process writes what there is one of: the files beside weights and optimizer."""
        return True

    def together(self, work: Callable[[], T]) -> T:
        """Run ``work`` in every process of this engine; an error of one is an error in all of them. Collective."""
        return work()

    def only_first(self, work: Callable[[], T]) -> T | None:
        """Run ``work`` in the first process of this engine and give its result there, None in the others.

        Its error is an error in all of them, so that none waits for one that has failed. Collective.
        """
        return work()

    @property
    @abstractmethod
    def num_parameters(self) -> int:
        """Parameters of the full model over all ranks; tied ones count once."""

    @abstractmethod
    def infer(
        self,
        batch: DataProto,
        outputs: tuple[str, ...] = ("log_probs",),
        temperature: float = 1.0,
        micro_batch_size: int | None = None,
        max_tokens: int | None = None,
    ) -> dict[str, Tensor]:
        """Forward passes in evaluation mode, without gradient.

        Args:
            outputs: of ``log_probs``, ``entropy``, ``sum_pi_squared``, ``full_kl`` (a language model), ``values`` (a
                value model). ``full_kl`` is the KL to the model of `compare_with` over the full vocabulary, or the
                measure that it was called with. An engine that replays experts has ``routed_experts``, too: (B, P+T,
                layers, top_k) int16, those that the passes chose, -1 where no pass was needed.
                ``top_k_ids`` (B, T, K) int32 and ``top_k_log_probs`` (B, T, K) are the most likely tokens of an engine
                with `PassSettings.top_k`; ``candidate_log_probs`` (B, T, K) is for the tokens of the batch's column
                ``candidate_ids``.
            temperature: logits are divided by it.

        Returns:
            Per output (B, T) float32 on the CPU, zero where ``response_mask`` is 0. The value at t is that of the state
            before response token t.

        Raises:
            EngineError: the model has no such output.
            DataError: the batch does not fit (a response token that nothing precedes, positions out of order).
        """

    @abstractmethod
    def train_batch(
        self,
        batch: DataProto,
        loss_fn: LossFn,
        temperature: float = 1.0,
        micro_batch_size: int | None = None,
        max_tokens: int | None = None,
    ) -> MetricSet:
        """One optimizer step on one mini-batch: forward, backward, clip, step.

        A step whose gradient norm is not finite is skipped on every rank alike, and so is one without a single valid
        token.

        Returns:
            The loss's own metrics, ``loss``, ``grad_norm``, ``lr``, ``skipped_nonfinite_step``, ``skipped_empty_step``.

        Raises:
            EngineError: the engine has no optimizer.
        """

    def compare_with(self, reference: Engine, measure: Measure = full_kl) -> None:
        """Name the frozen model of the output ``full_kl``; it runs inside this engine's passes, micro-batch by
        micro-batch, so that its logits never outlive one. Without the output nothing comes of it.

        Args:
            measure: what the output is, of the logits of both.
        """
        self.reference = reference

    @abstractmethod
    def train_flops(self, lengths: Sequence[int]) -> float:
        """Floating-point operations of training on sequences of these lengths (convention: `verl.models.flops`)."""

    def tower_flops(self, column: Iterable[Any]) -> float:
        """The same of the vision tower, for rows of ``multi_modal_inputs``."""
        return 0.0

    @abstractmethod
    def step_scheduler(self) -> None:
        """Advance the learning rate; once per global step, after its last mini-batch."""

    @abstractmethod
    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The weights under Hugging Face names, detached and whole on every rank; tied ones once, under the first."""

    @property
    def exports_itself(self) -> bool:
        """Whether `export_weights` gives the parameters' own memory, which the next update changes."""
        return False

    def export_base(self) -> dict[str, Tensor]:
        """The weights under an adapter, which never change: this engine's memory, where one process has all of it."""
        return {}

    def export_adapter(self) -> Iterator[tuple[str, Tensor]]:
        """The factors of a LoRA adapter as peft calls them in a file, detached and whole on every rank."""
        raise AssertionError(f"{type(self).__name__} has no adapters")

    @abstractmethod
    def load_weights(self, weights: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> None:
        """Take over weights under Hugging Face names, all or none (reference refresh, averages); rank 0's count."""

    def copy_weights(self, source: Engine) -> None:
        """Take over the weights of another engine that holds the same model on the same ranks. Collective."""
        self.load_weights(source.export_weights())

    @abstractmethod
    def hf_writer(self, tokenizer: Tokenizer | None = None) -> HFWriter:
        """What writes this model's folder from weights that it is handed: a checkpoint hands it its own copy."""

    @abstractmethod
    def state(self) -> EngineState:
        """What this rank writes of all that a bitwise resume needs.

        On several ranks: its boxes of the optimizer's state, complete weights that are the Nth part of all, and on the
        first one the random states. Nothing else is ever complete anywhere. The tensors may share the engine's memory
        until they are saved or copied.
        """

    @abstractmethod
    def load_state(self, state: EngineState) -> None:
        """Continue from a complete state, which every rank is given; sections that it does not hold stay as they are.

        Of a state that is stored in files (`verl.checkpoint.read_part`) a rank reads its shards.

        Raises:
            CheckpointError: the state belongs to another model or optimizer.
        """

    def compare_copies(self) -> int:
        """Compare bit by bit the weights and optimizer states that several ranks hold alike. Collective.

        Returns:
            How many tensors, or boxes of them, several ranks hold.

        Raises:
            CopiesDifferError: some differ; it names them, the ranks and their nodes.
        """
        return 0

    @abstractmethod
    def offload(self, params: bool = True, optimizer: bool = True) -> None:
        """Move parameters and optimizer state to host memory; the next use brings them back.

        On a CPU parameters stay, and the optimizer's state waits in a file.
        """

    @abstractmethod
    def onload(self, params: bool = True, optimizer: bool = True) -> None:
        """Move parameters and optimizer state to the device."""

    @abstractmethod
    def save_hf(self, folder: str | Path, tokenizer: Tokenizer | None = None) -> None:
        """Write a Hugging Face folder: configuration, weights in their own dtype, tokenizer."""
