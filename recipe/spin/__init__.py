"""SPIN (Chen et al., arXiv 2401.01335), in its online form: the better of two own answers wins."""
