"""Sampling over Hugging Face causal language models with its own scheduler and KV cache."""
