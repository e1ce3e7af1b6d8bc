"""The built-in algorithms, discovered automatically: one module each, with a description called ``ALGORITHM``."""
