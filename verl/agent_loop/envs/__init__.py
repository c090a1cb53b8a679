"""Text environments with gymnasium's ``reset`` and ``step`` as rollouts: `adapter` calls them, `loop` plays them."""
