"""The command ``verl``: every program under one name, with short help, presets, a dry run and completion."""
