"""How `collect` and `learn` are composed in time."""
