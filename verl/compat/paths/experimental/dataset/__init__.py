"""Orders of the training prompts, under the path that users' code imports."""
