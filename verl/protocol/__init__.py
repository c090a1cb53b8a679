"""The batch between the stages: `DataProto`, its futures, declared fields, wire format, and the shards of weights."""

from verl.protocol.batch import DataProto, DataProtoItem
from verl.protocol.columns import union_numpy_dict, union_tensor_dict
from verl.protocol.equality import deep_equal
from verl.protocol.fields import CANDIDATES, Field, declare_field, declared_field
from verl.protocol.future import DataProtoFuture
from verl.protocol.gather import all_gather_data_proto
from verl.protocol.padding import (
    collate_fn,
    fold_batch_dim,
    pad_dataproto_to_divisor,
    unfold_batch_dim,
    unpad_dataproto,
)
from verl.protocol.references import is_reference, register_reference, resolve
from verl.protocol.settings import SHARED_ROWS, DataProtoConfig
from verl.protocol.sharding import ShardSpec

__all__ = [
    "CANDIDATES",
    "SHARED_ROWS",
    "DataProto",
    "DataProtoConfig",
    "DataProtoFuture",
    "DataProtoItem",
    "Field",
    "ShardSpec",
    "all_gather_data_proto",
    "collate_fn",
    "declare_field",
    "declared_field",
    "deep_equal",
    "fold_batch_dim",
    "is_reference",
    "pad_dataproto_to_divisor",
    "register_reference",
    "resolve",
    "unfold_batch_dim",
    "union_numpy_dict",
    "union_tensor_dict",
    "unpad_dataproto",
]
