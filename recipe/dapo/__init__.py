"""DAPO (Yu et al., arXiv 2503.14476)."""
