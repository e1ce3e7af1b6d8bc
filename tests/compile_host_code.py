"""Compiles the host code of all collectives, in one process: what they share is compiled once. For ``make test``."""

from __future__ import annotations

import importlib

from shotcast.collectives.registry import registered
from shotcast.transport.cpu.host_call import HostCall


def compile_all() -> int:
    """Compile every schedule of CPU ranks that is not kept on disk yet. Return how many there are."""
    places = {
        place
        for algorithm in registered().values()
        for form in algorithm.forms.values()
        for place in (form.cpu, form.hosts)
    }
    schedules = set()
    for place in sorted(places - {""}):
        module, _, name = place.partition(":")
        call = getattr(importlib.import_module(module), name)
        assert isinstance(call, HostCall)
        schedules.add(call.schedule)
        if call.alone is not None:
            schedules.add(call.alone.schedule)
    for schedule in schedules:
        schedule.get()
    return len(schedules)


if __name__ == "__main__":
    compile_all()
