"""The settings: a file for each section, and what declares, converts and names them."""
