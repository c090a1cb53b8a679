"""GKD (Agarwal et al., arXiv 2306.13649): distillation on the answers of the student."""
