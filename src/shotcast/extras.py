"""Optional packages, by the extra that installs them."""

from __future__ import annotations

import importlib.util

from shotcast.errors import ConfigError

_PACKAGES = (
    ("engine", ("gguf", "llguidance", "safetensors", "transformers")),
    ("server", ("fastapi", "prometheus_client", "pydantic", "uvicorn")),
    ("plots", ("matplotlib",)),
    ("ray", ("ray",)),
    ("triton", ("triton",)),
)
EXTRAS = dict(_PACKAGES)
"""The packages of each extra."""
INCLUDES = {"server": ("engine",)}
"""Extras that install other extras, too."""


def missing(extra: str) -> tuple[str, ...]:
    """Return an extra's packages that are not installed, without importing any."""
    packages = [package for each in (extra, *INCLUDES.get(extra, ())) for package in EXTRAS[each]]
    return tuple(package for package in packages if importlib.util.find_spec(package) is None)


def install_line(extra: str) -> str:
    """Return the command that installs an extra."""
    return f"pip install 'shotcast[{extra}]'"


def require(extra: str, what: str) -> None:
    """Raise ConfigError if a package of an extra that ``what`` needs is not installed."""
    if absent := missing(extra):
        raise ConfigError(f"{what} needs packages that are not installed ({', '.join(absent)}): {install_line(extra)}")


def explain(error: BaseException | None) -> str:
    """Return which package of an extra caused an error, and how to install it; "" if none did."""
    while error is not None:
        package = (error.name or "").partition(".")[0] if isinstance(error, ImportError) else ""
        for extra, packages in EXTRAS.items():
            if package in packages:
                return f"this needs a package that is not installed ({package}): {install_line(extra)}"
        error = error.__cause__
    return ""
