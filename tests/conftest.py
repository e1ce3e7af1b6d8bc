"""Fixtures and hooks of all tests."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# Tests share few cores: how long an example takes says nothing about the code.
settings.register_profile("shared", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared")
