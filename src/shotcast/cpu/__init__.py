"""Compiled collectives of CPU ranks over POSIX shared memory; :mod:`shotcast.cpu.executor` is the way in."""
