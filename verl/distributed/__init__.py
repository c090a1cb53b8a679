"""Several processes on one model: joining them, meshes, collectives that cost nothing on one rank, sharded tensors."""

from verl.distributed.mesh import data_parallel_mesh
from verl.distributed.process_group import RankPlace, join_group, leave_group
from verl.distributed.ranks import Ranks

__all__ = ["RankPlace", "Ranks", "data_parallel_mesh", "join_group", "leave_group"]
