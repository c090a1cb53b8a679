"""SPPO (Wu et al., arXiv 2405.00675)."""
