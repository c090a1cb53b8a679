"""The mathematics: tensors in, tensors out; nothing here knows a model, a file, a process group or a trainer."""
