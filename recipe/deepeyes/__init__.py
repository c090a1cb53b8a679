"""DeepEyes (Zheng et al., arXiv 2505.14362): a model that looks closer at parts of an image while it reasons."""
