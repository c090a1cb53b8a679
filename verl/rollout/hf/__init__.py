"""Sampling over Hugging Face causal language models with a scheduler and a KV cache of its own."""
