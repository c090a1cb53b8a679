"""What a run will need: devices, models, bytes and seconds as pure arithmetic. Loads no torch and allocates nothing."""
