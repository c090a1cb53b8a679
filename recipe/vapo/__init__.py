"""VAPO (arXiv 2504.05118): PPO with a pretrained critic, for long chains of thought."""
