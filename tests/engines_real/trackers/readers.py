"""Read back what the trackers wrote, with the packages' own readers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def swanlab_records(folder: Path) -> list[dict[str, Any]]:
    """The records of the only run below ``folder``, in the order in which they were written."""
    from google.protobuf.json_format import MessageToDict
    from swanlab.sdk.internal.core_python.store import DataStoreReader
    from swanlab.sdk.internal.core_python.sync import Record

    (file,) = folder.glob("run-*/run-*.swanlab")
    reader, found = DataStoreReader(), []
    reader.open(file)
    for data in reader:
        record = Record()
        record.ParseFromString(data)
        found.append(MessageToDict(record))
    reader.close()
    return found


def swanlab_scalars(folder: Path) -> dict[str, list[tuple[int, Any]]]:
    """(step, value) of every scalar by name; protobuf's JSON writes NaN as text."""
    found: dict[str, list[tuple[int, Any]]] = {}
    for record in swanlab_records(folder):
        if "scalar" in record:
            one = record["scalar"]
            found.setdefault(one["key"], []).append((int(one["step"]), one["value"]["number"]))
    return found


def wandb_history(folder: Path, key: str) -> list[tuple[int, float]]:
    """(step, value) of one metric of the only offline run below ``folder``."""
    from swanlab.converter.wb.wbdatastore import WBDataStoreReader
    from wandb.proto import wandb_internal_pb2

    (file,) = folder.glob("offline-run-*/run-*.wandb")
    found = []
    with WBDataStoreReader() as reader:
        reader.open(file)
        while data := reader.scan():
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            items = {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            if key in items:
                found.append((int(items["_step"]), items[key]))
    return found
