"""``python -m verl.model_merger merge|test``: a checkpoint as a Hugging Face folder, and a comparison of two."""

from verl.models.merging import compare_folders, merge

__all__ = ["compare_folders", "merge"]
