"""Step folders that are complete or absent: staged, checked by a manifest, published by one rename.

Layout of ``<root>/global_step_N/``: per role a folder with ``huggingface/`` (configuration, weights, tokenizer: loads
with ``from_pretrained``), ``optimizer.safetensors`` (of several ranks ``optimizer-00001-of-00004.safetensors``, each
its own shard), ``extra.safetensors`` and ``extra.json`` (generators, schedule);
``trainer.json`` (the controller's state) and ``manifest.json`` (sizes and checksums, written last).
``<root>/latest_checkpointed_iteration.txt`` names the newest step for other programs; resuming does not need it.
"""

from verl.checkpoint.background import BackgroundPart, PartInWork
from verl.checkpoint.best import BestCheckpoint, check_metric
from verl.checkpoint.deadly import noted_reading
from verl.checkpoint.files import FileRecord
from verl.checkpoint.find import Checkpoint, find_checkpoint, list_checkpoints
from verl.checkpoint.lock import RunLock
from verl.checkpoint.part import prepare_part, read_part, write_part
from verl.checkpoint.reader import CheckpointReader
from verl.checkpoint.remote import BackgroundCopies, RemoteCheckpoints, find_or_fetch
from verl.checkpoint.state import EngineState
from verl.checkpoint.writer import CheckpointWriter

__all__ = [
    "BackgroundCopies",
    "BackgroundPart",
    "BestCheckpoint",
    "Checkpoint",
    "CheckpointReader",
    "CheckpointWriter",
    "EngineState",
    "FileRecord",
    "PartInWork",
    "RemoteCheckpoints",
    "RunLock",
    "check_metric",
    "find_checkpoint",
    "find_or_fetch",
    "list_checkpoints",
    "noted_reading",
    "prepare_part",
    "read_part",
    "write_part",
]
