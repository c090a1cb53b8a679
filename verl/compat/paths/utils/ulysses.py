"""Slices of packed rows over the ranks that share them, under the path and names that users' code imports."""

from verl.distributed.slices import gather_and_unpad as gather_outputs_and_unpad
from verl.distributed.slices import pad as ulysses_pad
from verl.distributed.slices import pad_and_slice as ulysses_pad_and_slice_inputs
from verl.distributed.slices import sequence_group_size as get_ulysses_sequence_parallel_world_size
from verl.distributed.slices import set_sequence_group as set_ulysses_sequence_parallel_group
