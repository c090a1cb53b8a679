"""Sampling with vLLM in this process; neither this room nor vLLM is imported before a run needs it."""
