"""`RLHFDataset` and its collate function under the path that users' code imports."""

from verl.data.collate import collate_fn
from verl.data.rl_dataset import RLHFDataset
