"""Files, a recipe and the command line become one configuration."""
