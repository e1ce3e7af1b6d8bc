"""The table of model families."""

from __future__ import annotations

from shotcast.errors import ConfigError, UnsupportedError
from shotcast.models.families.gemma import GEMMA2, GEMMA3
from shotcast.models.families.llama import LLAMA
from shotcast.models.families.mistral import MISTRAL
from shotcast.models.families.olmo import OLMO2
from shotcast.models.families.phi import PHI3
from shotcast.models.families.qwen import QWEN2, QWEN3
from shotcast.models.family import ModelFamily

_FAMILIES: dict[str, ModelFamily] = {}


def register_family(family: ModelFamily) -> None:
    """Add a family to the table, so that its checkpoints can be read and run.

    Raises:
        ConfigError: another family has its name or one of its architectures.
    """
    for other in _FAMILIES.values():
        if (
            other.name == family.name
            or other.architecture == family.architecture
            or set(other.gguf_architectures) & set(family.gguf_architectures)
        ):
            raise ConfigError(f"the model family {family.name} has a name or an architecture of {other.name}")
    _FAMILIES[family.name] = family


for _family in (LLAMA, MISTRAL, QWEN2, QWEN3, PHI3, OLMO2, GEMMA2, GEMMA3):
    register_family(_family)


def find_family(name: str) -> ModelFamily:
    """Return the family of this name.

    Raises:
        UnsupportedError: it is not registered.
    """
    if (family := _FAMILIES.get(name)) is None:
        raise UnsupportedError(f"the model family {name!r} is not supported; accepted: {', '.join(_FAMILIES)}")
    return family


def by_hf_name(architectures: list[str], model_type: object) -> ModelFamily:
    """Return the family that ``architectures`` of a config.json names, or ``model_type`` if that list is empty.

    Raises:
        UnsupportedError: no registered family has this name.
    """
    known = {family.architecture: family for family in _FAMILIES.values()}
    accepted = ", ".join(known)
    if not architectures:
        if not isinstance(model_type, str) or (family := _FAMILIES.get(model_type)) is None:
            raise UnsupportedError(
                f"config.json names no architecture, and its model_type is {model_type!r}; "
                f"accepted architectures: {accepted}"
            )
        return family
    if len(architectures) != 1 or architectures[0] not in known:
        raise UnsupportedError(f"architecture {', '.join(architectures)} is not supported; accepted: {accepted}")
    return known[architectures[0]]


def by_gguf_architecture(architecture: object) -> ModelFamily | None:
    """Return the family that ``general.architecture`` of a GGUF file names, None if it is not registered."""
    for family in _FAMILIES.values():
        if isinstance(architecture, str) and architecture in family.gguf_architectures:
            return family
    return None


def gguf_architectures() -> list[str]:
    """Return the accepted values of ``general.architecture`` of GGUF files."""
    return [architecture for family in _FAMILIES.values() for architecture in family.gguf_architectures]
