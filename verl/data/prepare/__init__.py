"""Programs that write the data sets of the examples: ``python -m verl.data.prepare.<name> --help``."""
