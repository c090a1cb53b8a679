"""`MultiTurnSFTDataset` under the path that users' code imports."""

from verl.data.sft_dataset import MultiTurnSFTDataset
