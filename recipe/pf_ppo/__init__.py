"""PF-PPO (Shen and Zhang, arXiv 2409.06957): PPO on answers that are drawn by their rewards."""
