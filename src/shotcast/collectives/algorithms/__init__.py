"""The built-in algorithms: one module each, with a description called ``ALGORITHM``. They are found by themselves."""
