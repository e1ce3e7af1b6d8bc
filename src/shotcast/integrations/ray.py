"""Registration of the ``shotcast`` backend in ``ray.util.collective``."""

from __future__ import annotations

import math

from shotcast import extras
from shotcast.errors import ConfigError, UnsupportedError
from shotcast.integrations.signatures import Expected, refusal

AT_LEAST, BELOW = (2, 60), (3,)
"""The supported versions. 2.60.0 was run."""
EXPECTED = (
    Expected("ray.util.collective.backend_registry", "register_collective_backend", ("name", "group_cls"), whole=True),
    Expected(
        "ray.util.collective.collective_group.base_collective_group",
        "BaseGroup.__init__",
        ("self", "world_size", "rank", "group_name"),
        whole=True,
    ),
    Expected("ray.experimental.internal_kv", "_internal_kv_put"),
    Expected("ray.experimental.internal_kv", "_internal_kv_get"),
    Expected("ray.experimental.internal_kv", "_internal_kv_del"),
)
BACKEND = "shotcast"
DEFAULT_TIMEOUT_S = 600.0


def unsupported_reason() -> str:
    """Return why actors in this environment cannot use the backend; empty if they can. Does not import Ray."""
    return refusal("ray", "Ray", AT_LEAST, BELOW, EXPECTED)


def register(timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
    """Register ``backend="shotcast"`` in ``ray.util.collective`` in this process.

    The driver and every actor must register it. Call this on the driver and set ``worker_process_setup_hook`` in Ray's
    runtime environment, so that actors need no change::

        register()
        ray.init(runtime_env={"worker_process_setup_hook": "shotcast.integrations.ray.register"})

    Args:
        timeout_s: the deadline of calls in groups that this process joins from now on. A second call changes it.

    Raises:
        ConfigError: ``timeout_s`` is not a positive number of seconds.
        UnsupportedError: Ray is not installed, or differs from 2.60.
    """
    if not (isinstance(timeout_s, int | float) and 0 < timeout_s < math.inf):
        raise ConfigError(f"timeout_s is a number of seconds above 0, not {timeout_s!r}")
    if why := unsupported_reason():
        install = f": {extras.install_line('ray')}" if extras.missing("ray") else ""
        raise UnsupportedError(f"{why}{install}")
    from ray.util.collective import backend_registry

    from shotcast.integrations.ray_group import ShotcastGroup

    ShotcastGroup.timeout_s = float(timeout_s)
    try:
        backend_registry.register_collective_backend(BACKEND, ShotcastGroup)
    except ValueError as error:
        if "already registered" not in str(error):
            raise
