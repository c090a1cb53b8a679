"""Rules between settings: errors and notices, before anything is allocated."""
