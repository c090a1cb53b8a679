"""The ladder of DeepSeek-R1 (arXiv 2501.12948): cold start, RL, rejection sampling, SFT of the base model, RL."""
