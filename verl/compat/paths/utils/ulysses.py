"""Slices of packed rows over the ranks that share them, under the path and names that users' code imports."""

from verl.compat.forms.sequence_slices import gather_and_unpad as gather_outputs_and_unpad
from verl.compat.forms.sequence_slices import pad as ulysses_pad
from verl.compat.forms.sequence_slices import pad_and_slice as ulysses_pad_and_slice_inputs
from verl.compat.forms.sequence_slices import sequence_group_size as get_ulysses_sequence_parallel_world_size
from verl.compat.forms.sequence_slices import set_sequence_group as set_ulysses_sequence_parallel_group
