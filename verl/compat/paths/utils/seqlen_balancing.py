"""Length balancing and dynamic batches under the path that users' code imports them from."""

from verl.algorithms.balancing import (
    calculate_workload,
    get_group_balanced_partitions,
    get_seqlen_balanced_partitions,
    greedy_partition,
    karmarkar_karp,
    log_seqlen_unbalance,
)
from verl.algorithms.micro_batches import ceildiv, roundup_divisible
from verl.algorithms.micro_batches import inverse_permutation as get_reverse_idx
from verl.compat.forms.dynamic_batch import prepare_dynamic_batch, rearrange_micro_batches, restore_dynamic_batch
