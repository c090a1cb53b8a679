"""ReTool (Feng et al., arXiv 2504.11536): a model that reasons with a Python interpreter."""
