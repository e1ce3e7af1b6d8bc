"""Comparison of a plug-in's expectations with the installed sources of its host program.

Sources are parsed, not imported: an import may start the host program's search for plug-ins, and a rejected host
program must stay unchanged.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

Version = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Expected:
    """A name that a module of a host program must define."""

    module: str  # the module, such as ``vllm.platforms.cuda``
    name: str  # a function, a class, a variable, or a member of a class after a dot
    parameters: tuple[str, ...] = ()  # of a function, the names of its first parameters; empty for anything else
    whole: bool = False  # these are all parameters, and not the first ones alone


def refusal(package: str, label: str, at_least: Version, below: Version, expected: Sequence[Expected]) -> str:
    """Return why the installed host program is not supported; empty if it is.

    Args:
        package: the name of its distribution and package.
        label: its display name.
        at_least, below: the supported versions.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return f"{label} is not installed"
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return f"the version of {label} is not known"
    numbers = re.match(r"\d+(?:\.\d+)*", version)
    found = tuple(int(number) for number in numbers[0].split(".")) if numbers else ()
    if not at_least <= found < below:
        first, end = (".".join(map(str, bound)) for bound in (at_least, below))
        return f"{label} {version} is not served; from {first} to below {end} is"
    root = Path(spec.submodule_search_locations[0])
    for one in expected:
        if why := _difference(root, one):
            return f"{label} {version} is not as expected: {why}"
    return ""


def _difference(root: Path, expected: Expected) -> str:
    """Return how the sources differ from the expectation; empty if they do not."""
    place = f"{expected.module}.{expected.name}"
    path = root.joinpath(*expected.module.split(".")[1:])
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    try:
        nodes: Sequence[ast.stmt] = ast.parse(file.read_text(encoding="utf-8")).body
    except (OSError, SyntaxError) as error:
        return f"the source of {expected.module} cannot be read ({error})"
    node = None
    for name in expected.name.split("."):
        node = defined(nodes, name)
        if node is None:
            return f"there is no {place}"
        nodes = node.body if isinstance(node, ast.ClassDef) else ()
    if not expected.parameters:
        return ""
    if not isinstance(node, ast.FunctionDef):
        return f"{place} is no function"
    found = tuple(one.arg for one in (*node.args.posonlyargs, *node.args.args))
    shown = (
        f"{place} takes ({', '.join(found)}), not ({', '.join(expected.parameters)}{'' if expected.whole else ', ...'})"
    )
    if expected.whole:
        same = found == expected.parameters and not (node.args.vararg or node.args.kwonlyargs or node.args.kwarg)
    else:
        same = found[: len(expected.parameters)] == expected.parameters
    return "" if same else shown


def defined(nodes: Sequence[ast.stmt], name: str) -> ast.stmt | None:
    """Return the last statement that defines a name, in any branch (``if TYPE_CHECKING`` too)."""
    found: ast.stmt | None = None
    for node in nodes:
        if isinstance(node, ast.If | ast.Try):
            found = defined([*node.body, *node.orelse], name) or found
            continue
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names = [node.name]
        elif isinstance(node, ast.Assign):
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
        elif isinstance(node, ast.AnnAssign):
            names = [node.target.id] if isinstance(node.target, ast.Name) else []
        else:
            names = []
        if name in names:
            found = node
    return found
