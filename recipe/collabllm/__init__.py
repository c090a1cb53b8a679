"""CollabLLM (Wu et al., arXiv 2502.00640): an answer is worth what the conversation after it comes to."""
