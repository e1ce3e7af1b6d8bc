"""The API page has every public name, with its arguments, and no other."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
import typer
from pages import ROOT

import shotcast
from shotcast import Algorithm, Form, errors, functional, overlap
from shotcast.cli import app
from shotcast.engine.async_llm import AsyncLLM
from shotcast.engine.client import EngineClient
from shotcast.engine.config import EngineConfig
from shotcast.engine.llm import LLM
from shotcast.engine.outputs import EngineStats, RequestOutput
from shotcast.engine.sampling_params import SamplingParams

TEXT = (ROOT / "docs" / "reference" / "api.md").read_text()
DOCSTRINGS = (ROOT / "docs" / "reference" / "docstrings.md").read_text()


def section(heading: str) -> str:
    """The text below a heading, up to the next."""
    found = re.search(rf"^#+ {re.escape(heading)}\n(.*?)(?=^#|\Z)", TEXT, re.MULTILINE | re.DOTALL)
    assert found is not None, f"no heading {heading!r}"
    return found[1]


def listed(heading: str) -> list[str]:
    """The first cells of the tables of a section."""
    return re.findall(r"^\| `([^`]+)` \|", section(heading), re.MULTILINE)


def shown(name: str, function: Callable[..., Any]) -> str:
    """A name with its arguments and their defaults, without types."""
    signature = inspect.signature(function)
    plain = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in signature.parameters.values()
        if function.__module__ == functional.__name__ or parameter.name != "self"
    ]
    return f"{name}{inspect.Signature(plain)}"


def members(kind: type) -> set[str]:
    """The public methods, with their arguments, and the public properties of a class."""
    return {
        shown(name, value) if inspect.isfunction(value) else name
        for name, value in inspect.getmembers_static(kind)
        if not name.startswith("_") and (inspect.isfunction(value) or isinstance(value, property))
    }


def test_communicator() -> None:
    arguments = list(inspect.signature(shotcast.Communicator).parameters)
    assigned = {"rank", "world_size", "device", "max_bytes", "name", "topology"}
    names = listed("Communicator")
    assert names[: len(arguments)] == arguments
    assert set(names[len(arguments) :]) == members(shotcast.Communicator) | assigned
    assert f"`{shown('shotcast.Communicator', shotcast.Communicator)}`" in section("Communicator")


def test_attributes_of_a_communicator_are_those_of_an_instance() -> None:
    """Attributes that the constructor assigns are not in the class, so the test reads them from its source."""
    source = inspect.getsource(shotcast.Communicator)
    assigned = set(re.findall(r"self\.([a-z]\w*)(?:, self\.\w+)* *(?::[^=\n]+)?=[^=]", source))
    assigned |= {name for group in re.findall(r"((?:self\.[a-z]\w*, )+self\.[a-z]\w*) =", source)
                 for name in re.findall(r"self\.(\w+)", group)}  # fmt: skip
    assert assigned <= set(listed("Communicator"))


def test_engines() -> None:
    assigned = {name for name in EngineClient.__annotations__ if not name.startswith("_")}
    assert set(listed("LLM")) == members(LLM) | assigned
    for kind in (LLM, AsyncLLM):
        assert f"shotcast.{kind.__name__}(model, **options)`" in section("Engine")


@pytest.mark.parametrize("kind", [EngineConfig, SamplingParams, RequestOutput, EngineStats, Algorithm, Form])
def test_docstrings_have_the_fields_of_classes_that_the_page_leaves_to_them(kind: type) -> None:
    described = re.findall(r"^ +(\w+(?:, \w+)*): ", inspect.getdoc(kind) or "", re.MULTILINE)
    names = {name for group in described for name in group.split(", ")}
    assert {item.name for item in fields(kind)} - names == set()
    assert f"[`{kind.__name__}`](../../src/{kind.__module__.replace('.', '/')}.py)" in DOCSTRINGS


@pytest.mark.parametrize("kind", [AsyncLLM, RequestOutput])
def test_methods_that_the_page_leaves_to_docstrings_have_one(kind: type) -> None:
    public = [value for name, value in inspect.getmembers_static(kind) if not name.startswith("_")]
    methods = [value for value in public if inspect.isfunction(value) or isinstance(value, property)]
    assert methods
    assert [value for value in methods if not value.__doc__] == []


def test_algorithms() -> None:
    calls = [shown("register_algorithm", shotcast.register_algorithm), shown("registered", shotcast.registered)]
    assert listed("Algorithms of your own")[:2] == calls
    assert set(listed("Algorithms of your own")[2:]) <= set(shotcast.__all__)


def test_functional() -> None:
    """Each function has a row by its first name; the text names the others, which may also end in ``_autograd``."""
    first = {name: function for name in functional.__all__ if (function := getattr(functional, name)).__name__ == name}
    assert set(listed("functional")) == {shown(name, function) for name, function in first.items()}
    others = {name.removesuffix("_autograd") for name in functional.__all__} - set(first)
    assert others == set(re.findall(r"`(\w+)` is `\w+`", section("functional")))
    for second, name in re.findall(r"`(\w+)` is `(\w+)`", section("functional")):
        assert getattr(functional, second) is getattr(functional, name)
    for name in functional.__all__:
        assert getattr(functional, name) is getattr(functional, name.removesuffix("_autograd"))


def test_overlap() -> None:
    found = {name: getattr(overlap, name) for name in overlap.__all__}
    unshown = ("Chain", "Decision", "Lanes")
    calls = {name if name in unshown else shown(name, value) for name, value in found.items() if name != "Chain"}
    assert {re.sub(r"=<function (\w+).*?>", r"=\1", call) for call in calls} == set(listed("overlap"))
    assert set(listed("Chain")) == members(overlap.Chain) | {"decision"}


def test_errors() -> None:
    kinds = {
        name for name, value in vars(errors).items() if inspect.isclass(value) and value.__module__ == errors.__name__
    }
    assert set(listed("Errors")) == kinds


def test_spawn() -> None:
    assert listed("spawn") == [shown("spawn", shotcast.spawn)]


def test_every_name_of_the_package_is_there() -> None:
    assert {
        name for name in shotcast.__all__ if not name.startswith("__") and not re.search(rf"\b{name}\b", TEXT)
    } == set()


def commands(group: Any, prefix: str) -> set[str]:
    found = set()
    for name, command in group.commands.items():
        found |= commands(command, f"{prefix} {name}") if hasattr(command, "commands") else {f"{prefix} {name}"}
    return found


def test_command_line() -> None:
    assert set(listed("Command line")) == commands(typer.main.get_group(app), "shotcast")


def test_every_line_says_something() -> None:
    assert re.findall(r"^\| `(\w+)[^`]*` \| +\|", TEXT, re.MULTILINE) == []
