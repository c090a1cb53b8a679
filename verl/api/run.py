"""A run on disk: what it measured, what it saved, and how to continue it."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.config.loading.configuration import write_private
from verl.errors import CheckpointError, DataError
from verl.journal.places import newest_file
from verl.json_text import read_json
from verl.observability.plots import plot_run, read_metrics

if TYPE_CHECKING:
    import pandas as pd

    from verl.models.trained import PreTrainedModel

METRICS, RECORD, CURVE = "metrics.jsonl", "run.json", "curve.png"
OF_ACTOR = ("actor", "model")
"""Folders of a checkpoint that may hold the trained model."""


@dataclass(frozen=True)
class Run:
    """A run, while its folder is there; `open_run` makes one of a folder.

    Args:
        folder: ``trainer.default_local_dir``.
        method: name of `verl.api.methods.METHODS`.
        words: settings as on a command line.
        stopped: why it ended early ("SIGINT: ..."); empty: it is complete, or was started elsewhere.

    Example:
        >>> run = verl.train("grpo", model="Qwen/Qwen3-0.6B", data=rows, reward=score)
        >>> run.metrics["critic/score/mean"].plot()
        >>> model = run.model()
    """

    folder: Path
    method: str
    words: tuple[str, ...] = field(default=(), repr=False)
    stopped: str = ""

    @property
    def command(self) -> str:
        """The command line of this run; equal settings give equal bits."""
        return f"verl {_subcommand(self.method)} {shlex.join(self.words)}"

    @property
    def metrics(self) -> pd.DataFrame:
        """A row per step, a column per metric; index ``step``.

        Raises:
            DataError: the run wrote none: no step was complete, or ``trainer.logger`` does not name ``file``.
        """
        import pandas as pd

        rows = read_metrics(self._metrics())
        frame = pd.DataFrame([data for _, data in rows], index=pd.Index([step for step, _ in rows], name="step"))
        return frame.groupby(level="step").first()  # a step's validation may stand in a line of its own

    @property
    def steps(self) -> int:
        """The last step that was logged; 0: none."""
        try:
            return int(self.metrics.index[-1])
        except DataError:
            return 0

    @property
    def checkpoint(self) -> Path | None:
        """The newest checkpoint that is complete; None: there is none."""
        from verl.checkpoint import find_checkpoint  # loads torch

        return find_checkpoint(self.folder)

    @property
    def model_path(self) -> Path:
        """The folder of the trained model, which ``from_pretrained`` loads with its tokenizer.

        Raises:
            CheckpointError: nothing was saved, or no model.
        """
        checkpoint = self.checkpoint
        if checkpoint is None:
            raise CheckpointError("this run has saved nothing", got=str(self.folder), fix="Set trainer.save_freq=20.")
        for role in OF_ACTOR:
            folder = checkpoint / role / "huggingface"
            if any(folder.glob("*.safetensors")):
                return folder
        raise CheckpointError("this checkpoint holds no model in Hugging Face's form", got=str(checkpoint))

    def model(self, **arguments: Any) -> PreTrainedModel:
        """The trained model, of an adapter with its base; ``arguments`` go to ``from_pretrained``.

        Raises:
            CheckpointError: see `model_path`.
        """
        from verl.models.trained import load_trained

        return load_trained(self.model_path, **arguments)

    def resume(self, **settings: Any) -> Run:
        """Go on from the newest checkpoint, bit for bit; see `verl.resume`."""
        import verl  # loads the programs

        run: Run = verl.resume(self, **settings)
        return run

    def plot(
        self, keys: list[str] | None = None, path: str | Path | None = None, x: str = "step", smooth: float = 0.0
    ) -> Any:
        """Draw its curves; in a notebook the picture is shown.

        Args:
            keys: metrics; by default reward, loss and accuracy.
            path: of the PNG; by default in the run's folder.
            x: ``step``, ``seconds`` or ``tokens``.
            smooth: weight of the past in a moving average, below 1; 0: none.

        Returns:
            The picture in a notebook, else its path.
        """
        place = plot_run(self._metrics(), path or self.folder / CURVE, keys, self.folder.name, x, smooth)
        from verl.observability.backends.notebook import in_notebook

        if not in_notebook():
            return place
        from IPython.display import Image

        return Image(filename=str(place))

    def _metrics(self) -> Path:
        return newest_file(self.folder / METRICS) or self.folder / METRICS


def _subcommand(method: str) -> str:
    from verl.api.methods import BY_REWARD

    return f"train {method}" if method in BY_REWARD else {"reward_model": "rm"}.get(method, method)


def write_run_record(run: Run) -> None:
    """Note in the run's folder what it is, for `open_run`; private, since settings may hold secrets."""
    run.folder.mkdir(parents=True, exist_ok=True)
    write_private(run.folder / RECORD, json.dumps({"method": run.method, "words": list(run.words)}, indent=1) + "\n")


def open_run(folder: str | Path) -> Run:
    """A run that was started before, by `verl.train` or by the command ``verl``.

    Raises:
        CheckpointError: the folder has no record of a run.
    """
    folder = Path(folder)
    file = folder / RECORD
    try:
        record = read_json(file.read_text(encoding="utf-8"))
        return Run(folder, str(record["method"]), tuple(map(str, record["words"])))
    except FileNotFoundError as error:
        raise CheckpointError(
            "this folder holds no run of verl.train or of the command verl", got=str(folder), fix=f"It has a {RECORD}."
        ) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"the record of this run is damaged: {error}", got=str(file)) from error
