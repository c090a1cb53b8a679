"""What only upstream's import paths use: its signatures around the library's functions, and helpers of its users' code.

Nothing below this room imports it.
"""
