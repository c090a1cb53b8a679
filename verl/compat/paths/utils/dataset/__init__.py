"""The datasets under the path that users' code imports; they live in `verl.data`."""

from verl.data.collate import collate_fn
from verl.data.rl_dataset import RLHFDataset
from verl.data.sft_dataset import MultiTurnSFTDataset
