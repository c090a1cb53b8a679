"""Sampling over Hugging Face causal language models with a scheduler and a key/value pool of its own."""
