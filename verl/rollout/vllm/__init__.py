"""Sampling with vLLM in this process; nothing here is imported, and vLLM least of all, before a run asks for it."""
