"""Built-in scorers: pure, deterministic, bounded in time on any input, and they never evaluate the text they read."""
