"""What a run needs of its machines: devices, pools, packages, and files of models."""
