"""PRIME (Cui et al., arXiv 2502.01456)."""
