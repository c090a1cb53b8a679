"""A generative reward model behind a server somewhere else, called by a reward function."""
