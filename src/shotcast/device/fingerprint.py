"""Kernel fingerprints, which identify the code that produced a result.

A fingerprint is a hash over the source code of a kernel and of everything that it calls or reads in this package:
jitted functions, host schedules, the arithmetic that these call, constants, and the options of the compilation. It is
computed from syntax trees only, so it needs neither a GPU nor Triton, numba or torch. Launch shapes (programs, warps,
tiles, chunks) are not part of it: they follow from a call, and tables record them.

Comments, docstrings, annotations and error messages do not count. (Two kinds of annotations do: ``tl.constexpr``, which
determines what is compiled in, and the tuple classes that jitted functions take.) Nor do the names of local variables,
arguments and module-level definitions, which are numbered in order of first use: renaming a function or moving it to
another file changes nothing. Names of attributes and keyword arguments count. If a module has two versions of a
function, the one under ``if INTERPRETED`` is skipped: results come from compiled kernels.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

PACKAGE = "shotcast"
_LENGTH = 12
_SILENT = ("ctx", "type_comment", "type_params", "kind", "returns", "annotation", "msg")
_WRAPPERS = "shotcast.device.cpu.compilation"
"""The module whose classes hold compiled functions; only their arguments count."""


class Meaning(NamedTuple):
    """The module that defines a name, and the name in it, which is empty for the module itself."""

    module: str
    name: str


class Source:
    """A module as a syntax tree; ``definitions`` maps each name to the top-level statements that define or fill it."""

    def __init__(self, name: str, text: str, is_package: bool = False):
        self.name, self._package = name, name if is_package else name.rpartition(".")[0]
        self.definitions: dict[str, list[ast.stmt]] = {}
        self.imports: dict[str, Meaning] = {}
        for statement in _top_level(ast.parse(text).body):
            self.imports |= self.imported(statement)
            for target in _defined(statement):
                self.definitions.setdefault(target, []).append(statement)

    def imported(self, node: ast.AST) -> dict[str, Meaning]:
        """Return the names that an import binds; none for other nodes."""
        if isinstance(node, ast.Import):
            roots = ((alias, alias.name if alias.asname else alias.name.partition(".")[0]) for alias in node.names)
            return {alias.asname or root: Meaning(root, "") for alias, root in roots}
        if isinstance(node, ast.ImportFrom):
            origin = importlib.util.resolve_name("." * node.level + (node.module or ""), self._package)
            return {alias.asname or alias.name: Meaning(origin, alias.name) for alias in node.names}
        return {}


def _top_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a module, skipping ones only for the interpreter or for type checkers."""
    for statement in body:
        if isinstance(statement, ast.If) and isinstance(statement.test, ast.Name):
            if statement.test.id not in ("INTERPRETED", "TYPE_CHECKING"):
                yield from _top_level(statement.body)
            yield from _top_level(statement.orelse)
        else:
            yield statement


def _defined(statement: ast.stmt) -> set[str]:
    """Return the names that a top-level statement defines or fills."""
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return {statement.name}
    found = set()
    for node in ast.walk(statement):
        if isinstance(getattr(node, "ctx", None), ast.Store):
            while isinstance(node, ast.Subscript | ast.Attribute):
                node = node.value
            if isinstance(node, ast.Name):
                found.add(node.id)
    return found


class Tree:
    """The sources of one version of the package.

    ``others`` maps the names of modules that count as part of the package, such as users' algorithms, to paths.
    """

    def __init__(self, folder: Path, others: Mapping[str, Path] | None = None):
        self._folder, self._others = folder, dict(others or {})
        self._sources: dict[str, Source | None] = {}

    def with_module(self, name: str, file: Path) -> Tree:
        """Return these sources plus one more module."""
        return Tree(self._folder, self._others | {name: file})

    def source(self, module: str) -> Source | None:
        """Return a module of the package; None for modules of other packages and for names that are not modules."""
        if module not in self._sources:
            self._sources[module] = self._read(module)
        return self._sources[module]

    def _read(self, module: str) -> Source | None:
        if module in self._others:
            return Source(module, self._others[module].read_text())
        first, *parts = module.split(".")
        if first != PACKAGE:
            return None
        file = self._folder.joinpath(*parts)
        if file.is_dir():
            return Source(module, (file / "__init__.py").read_text(), is_package=True)
        file = file.with_suffix(".py")
        return Source(module, file.read_text()) if parts and file.is_file() else None

    def meaning(self, module: str, name: str) -> Meaning:
        """Return where a name of a module is defined, following imports within the package."""
        source = self.source(module)
        if source is not None and name and name not in source.definitions:
            if name in source.imports:
                return self.meaning(*source.imports[name])
            if self.source(f"{module}.{name}"):
                return Meaning(f"{module}.{name}", "")
        return Meaning(module, name)

    def definitions(self, meaning: Meaning) -> list[ast.stmt]:
        """Return the package's statements that define or fill a name; none for names defined elsewhere."""
        source = self.source(meaning.module)
        return [] if source is None else source.definitions.get(meaning.name, [])


@dataclass(slots=True)
class _Scope:
    """The names in one definition: local ones, numbered as they are met, and imported ones."""

    source: Source
    own: set[str] = field(default_factory=set)
    imports: dict[str, Meaning] = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, node: ast.AST, source: Source) -> _Scope:
        """Return the scope of a function, or of another statement or expression, in which only lambdas bind names."""
        scope = cls(source)
        for inner in ast.walk(node):
            if isinstance(inner, ast.arg):
                scope.own.add(inner.arg)
            elif isinstance(node, ast.FunctionDef) and inner is not node:
                scope.imports |= source.imported(inner)
                if isinstance(inner, ast.Name) and not isinstance(inner.ctx, ast.Load):
                    scope.own.add(inner.id)
                elif isinstance(inner, ast.FunctionDef | ast.ExceptHandler) and inner.name:
                    scope.own.add(inner.name)
        return scope

    def text(self, name: str) -> str:
        """Return the number of a local name; other names unchanged."""
        return str(self.numbers.setdefault(name, len(self.numbers))) if name in self.own else name


class _Writer:
    """Serializes definitions without names, followed by the definitions that they refer to."""

    def __init__(self, tree: Tree):
        self._tree = tree
        self._numbers: dict[Meaning, int] = {}
        self._texts: list[str] = []

    def digest(self) -> str:
        """Return the hash of everything written and everything it refers to."""
        if not self._texts:
            raise ValueError("there is no kernel to make a fingerprint of")
        done = 0
        while done < len(self._numbers):
            meaning = list(self._numbers)[done]
            source = self._tree.source(meaning.module)
            assert source is not None
            texts = [self._text(one, _Scope.of(one, source)) for one in source.definitions[meaning.name]]
            self._texts.append(f"@{done}={';'.join(texts)}")
            done += 1
        return hashlib.sha256("\n".join(self._texts).encode()).hexdigest()[:_LENGTH]

    def begin(self, source: Source, expression: ast.expr, function: ast.FunctionDef | None = None) -> None:
        """Write an expression of a module or of one of its functions."""
        self._texts.append(self._text(expression, _Scope.of(function or expression, source)))

    def refer(self, meaning: Meaning) -> str:
        """Return a placeholder for a definition: a number or, for other packages, the full name."""
        if self._tree.definitions(meaning):
            return f"@{self._numbers.setdefault(meaning, len(self._numbers))}"
        return ".".join(filter(None, meaning))

    def begin_with(self, reference: str) -> None:
        """Write a definition given as ``"module:name"``."""
        module, _, name = reference.partition(":")
        self._texts.append(self.refer(self._tree.meaning(module, name)))

    def _text(self, node: Any, scope: _Scope, jitted: bool = False) -> str:
        """Write a node with its children, or a field of one; ``jitted`` means that it is in a kernel's signature."""
        if isinstance(node, list):
            return f"[{','.join(self._text(one, scope, jitted) for one in node if not _says_nothing(one))}]"
        if not isinstance(node, ast.AST):
            return scope.text(node) if isinstance(node, str) else repr(node)
        if (meaning := self._meaning(node, scope)) is not None:
            return self.refer(meaning)
        constant = ""
        match node:
            case ast.Name():
                return scope.text(node.id)
            case ast.Attribute():
                return f"{self._text(node.value, scope)}.{node.attr}"
            case ast.keyword():
                return f"{node.arg}={self._text(node.value, scope)}"
            case ast.Constant():
                return repr(node.value)
            case ast.Raise():
                return "raise"
            case ast.ClassDef():
                members = [] if scope.source.name == _WRAPPERS else node.body
                texts = [self._text(one, _Scope.of(one, scope.source)) for one in members if not _is_text(one)]
                return f"class{self._text([*node.bases, *node.decorator_list], scope)}{texts}"
            case ast.FunctionDef():
                jitted = any(_is_constexpr(one) for one in ast.walk(node.args))
            case ast.AnnAssign():
                value = "" if node.value is None else self._text(node.value, scope)
                return f"Assign{'!' * _is_constexpr(node)}([{self._text(node.target, scope)}],{value})"
            case ast.arg():
                constant = "!" * _is_constexpr(node)
                kind = self._meaning(node.annotation, scope) if jitted and node.annotation else None
                if kind is not None and any(isinstance(one, ast.ClassDef) for one in self._tree.definitions(kind)):
                    constant += self.refer(kind)
        fields = [getattr(node, name, None) for name in node._fields if name not in _SILENT]
        if isinstance(node, ast.FunctionDef) and node.name not in scope.own:
            fields = fields[1:]  # its name
        parts = (self._text(one, scope, jitted) for one in fields if one is not None)
        return f"{type(node).__name__}{constant}({','.join(parts)})"

    def _meaning(self, node: ast.AST, scope: _Scope) -> Meaning | None:
        """Return the definition or module that an expression names; None for a local name or anything else."""
        if isinstance(node, ast.Name) and node.id not in scope.own:
            if node.id in scope.imports:
                return self._tree.meaning(*scope.imports[node.id])
            is_global = node.id in scope.source.definitions or node.id in scope.source.imports
            return self._tree.meaning(scope.source.name, node.id) if is_global else None
        if isinstance(node, ast.Attribute) and (of := self._meaning(node.value, scope)) is not None:
            if not of.name and self._tree.source(of.module):
                return self._tree.meaning(of.module, node.attr)
            return None if self._tree.definitions(of) else Meaning(".".join(filter(None, of)), node.attr)
        return None


def _is_constexpr(node: ast.AST) -> bool:
    annotation = getattr(node, "annotation", None)
    return annotation is not None and "constexpr" in ast.unparse(annotation)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _says_nothing(node: Any) -> bool:
    """Return whether a function's statement is a bare string, an import, or an annotation without a value."""
    return (
        isinstance(node, ast.Import | ast.ImportFrom)
        or (isinstance(node, ast.AnnAssign) and node.value is None)
        or (isinstance(node, ast.AST) and _is_text(node))
    )


# --- fingerprints -----------------------------------------------------------------------------------------------------


def of_module(tree: Tree, module: str) -> str:
    """Return the fingerprint of everything in a kernel module: the kernels and the code that launches them."""
    source, writer = tree.source(module), _Writer(tree)
    if source is None:
        raise ValueError(f"there is no source of {module}")
    for name, statements in source.definitions.items():
        if any(isinstance(one, ast.FunctionDef | ast.ClassDef) for one in statements):
            writer.begin_with(f"{module}:{name}")
    return writer.digest()


def of_launch(tree: Tree, reference: str, *common: str) -> str:
    """Return the fingerprint of the kernel that a function ``bind(plan, context)`` launches.

    It covers the first argument of each ``context.launch(kernel, ...)``, the values of constants passed as
    ``NAME.value``, and the compilation ``options``, in this function and in the functions that it passes its context
    to. ``reference`` is ``"module:bind"``, and ``common`` names constants that are part of every compilation.
    """
    source, bind = _statement(tree, reference)
    if not isinstance(bind, ast.FunctionDef) or len(bind.args.args) < 2:
        raise ValueError(f"{reference} is not a function bind(plan, context)")
    launches, writer = list(_launches(source, bind, bind.args.args[1].arg)), _Writer(tree)
    for function, call in launches:
        writer.begin(source, call.args[0], function)
        for keyword in call.keywords:
            if keyword.arg == "options":
                writer.begin(source, _value(function, keyword.value), function)
            elif isinstance(keyword.value, ast.Attribute) and keyword.value.attr == "value":
                writer.begin(source, keyword.value, function)  # of a tl.constexpr, by which one kernel serves several
    for constant in common if launches else ():
        writer.begin_with(constant)
    return writer.digest()


def of_host_call(tree: Tree, reference: str, *common: str) -> str:
    """Return the fingerprint of a ``HostCall(...)``, given as ``"module:NAME"``: its schedule and its arithmetic."""
    source, statement = _statement(tree, reference)
    call, writer = getattr(statement, "value", None), _Writer(tree)
    keywords = {keyword.arg: keyword.value for keyword in call.keywords} if isinstance(call, ast.Call) else {}
    if "schedule" not in keywords:
        raise ValueError(f"{reference} is not a call of HostCall with a schedule")
    for name, value in keywords.items():
        if name in ("schedule", "arithmetic"):
            writer.begin(source, value)
    for constant in common:
        writer.begin_with(constant)
    return writer.digest()


def _statement(tree: Tree, reference: str) -> tuple[Source, ast.stmt]:
    """Return the last statement that defines ``"module:name"``, and its source."""
    module, _, name = reference.partition(":")
    meaning = tree.meaning(module, name)
    source, statements = tree.source(meaning.module), tree.definitions(meaning)
    if source is None or not statements:
        raise ValueError(f"there is no source of {reference}")
    return source, statements[-1]


def _launches(source: Source, bind: ast.FunctionDef, context: str) -> Iterator[tuple[ast.FunctionDef, ast.Call]]:
    """Yield the ``context.launch(kernel, ...)`` calls, each with its function: ``bind``, or one that it calls."""
    for node in ast.walk(bind):
        if not isinstance(node, ast.Call) or not node.args:
            continue
        if ast.unparse(node.func) == f"{context}.launch":
            yield bind, node
        elif isinstance(node.func, ast.Name):
            inner = source.definitions.get(node.func.id, [None])[-1]
            given = [position for position, one in enumerate(node.args) if ast.unparse(one) == context]
            if isinstance(inner, ast.FunctionDef) and inner is not bind and given:
                yield from _launches(source, inner, inner.args.args[given[0]].arg)


def _value(function: ast.FunctionDef, expression: ast.expr) -> ast.expr:
    """Return the expression assigned to a local name, or the expression itself."""
    if isinstance(expression, ast.Name):
        for node in ast.walk(function):
            if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == [expression.id]:
                return node.value
    return expression


@functools.cache
def installed() -> Tree:
    """Return the sources of the imported package."""
    return Tree(Path(__file__).parents[1])
