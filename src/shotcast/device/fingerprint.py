"""Fingerprints of kernels: which code made a result.

A fingerprint is a hash over the source code of a kernel and of everything that it calls or reads in this package:
jitted functions, host schedules, the arithmetic that these call, constants, and the options of the compilation. It is
made from syntax trees alone, so it needs neither a GPU nor Triton, numba or torch.

Two kernels have one fingerprint exactly when their trees are equal after these are taken out: comments, docstrings,
annotations, the texts of errors, and names. (Of annotations, ``tl.constexpr`` stays, which decides what is compiled in,
and so do the classes of tuples that jitted functions take.) Local variables, arguments and everything that the package
defines are numbered in the order of their first use instead, keyword arguments by the position of the parameter, and
members of the package's classes by their position. So renaming a function or moving it to another file changes nothing,
and any change of an operator, a constant or the structure does. Names of other packages and attributes of their values
stay. Where a module has two forms of a function, the one under ``if INTERPRETED`` is left out: results come from
compiled kernels.

Launch shapes (programs, warps, tiles, chunks) are not part of it: they follow from a call, and tables record them.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

PACKAGE = "shotcast"
_LENGTH = 12
_SILENT = ("ctx", "type_comment", "type_params", "kind")
_WRAPPERS = ("shotcast.device.cpu.compilation",)
"""Modules whose classes hold what is compiled: of these only the arguments count."""


class Source:
    """A module by its syntax tree: what it defines, and what its imports mean.

    Attributes:
        name: of the module.
        definitions: by name, the statements at the top level that define or fill it.
    """

    def __init__(self, name: str, text: str, is_package: bool = False):
        self.name = name
        self.definitions: dict[str, list[ast.stmt]] = {}
        self._origin = name if is_package else name.rpartition(".")[0]
        self._imports: dict[str, tuple[str, str]] = {}
        for statement in _top_level(ast.parse(text).body):
            for target in _defined(statement):
                self.definitions.setdefault(target, []).append(statement)
            self._imports |= self.imported(statement)

    def imported(self, statement: ast.stmt) -> dict[str, tuple[str, str]]:
        """Return the local names that an import binds, each as a module and a name in it (empty: the module)."""
        if isinstance(statement, ast.Import):
            return {alias.asname or alias.name.partition(".")[0]: (_module(alias), "") for alias in statement.names}
        if isinstance(statement, ast.ImportFrom):
            origin = statement.module or ""
            if statement.level:
                parts = self._origin.split(".")
                base = parts[: len(parts) - statement.level + 1]
                origin = ".".join([*base, *([origin] if origin else [])])
            return {alias.asname or alias.name: (origin, alias.name) for alias in statement.names}
        return {}

    def meaning(self, name: str) -> tuple[str, str] | None:
        """Return the module that defines a global name, and its name there; None for a builtin."""
        return (self.name, name) if name in self.definitions else self._imports.get(name)


def _module(alias: ast.alias) -> str:
    return alias.name if alias.asname else alias.name.partition(".")[0]


def _top_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a module, without those for the interpreter alone or for type checkers."""
    for statement in body:
        if isinstance(statement, ast.If) and isinstance(statement.test, ast.Name):
            if statement.test.id not in ("INTERPRETED", "TYPE_CHECKING"):
                yield from _top_level(statement.body)
            yield from _top_level(statement.orelse)
        else:
            yield statement


def _defined(statement: ast.stmt) -> set[str]:
    """Return the names that a statement at the top level defines or fills."""
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return {statement.name}
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return set()
    found = set()
    inner = _inner_names(statement)
    for node in ast.walk(statement):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id not in inner:
            found.add(node.id)
        elif isinstance(node, ast.Subscript | ast.Attribute) and isinstance(node.ctx, ast.Store):
            base: ast.expr = node
            while isinstance(base, ast.Subscript | ast.Attribute):
                base = base.value
            if isinstance(base, ast.Name):
                found.add(base.id)
    return found


def _inner_names(node: ast.AST) -> set[str]:
    """Return the names that comprehensions and lambdas bind."""
    found = set()
    for inner in ast.walk(node):
        if isinstance(inner, ast.arg):
            found.add(inner.arg)
        elif isinstance(inner, ast.comprehension):
            found |= {name.id for name in ast.walk(inner.target) if isinstance(name, ast.Name)}
    return found


class Tree:
    """The sources of one version of the package.

    Args:
        folder: of the package's files.
        others: paths of further modules that count as the package's own, by name: users' algorithms.
    """

    def __init__(self, folder: Path, others: Mapping[str, Path] | None = None):
        self._folder, self._others = folder, dict(others or {})
        self._sources: dict[str, Source | None] = {}

    def with_module(self, name: str, file: Path) -> Tree:
        """Return these sources and one more module."""
        return Tree(self._folder, self._others | {name: file})

    def source(self, module: str) -> Source | None:
        """Return a module of the package; None for one of another package, and for a name that is no module."""
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


class _Definition(NamedTuple):
    module: str
    name: str


@dataclass(slots=True)
class _Scope:
    """The names of one definition: local ones with their numbers (None until the first use), and imported ones."""

    source: Source
    local: dict[str, int | None] = field(default_factory=dict)
    imports: dict[str, tuple[str, str]] = field(default_factory=dict)
    used: int = 0

    def number(self, name: str) -> int:
        number = self.local[name]
        if number is None:
            number = self.local[name] = self.used
            self.used += 1
        return number


class _Writer:
    """Writes definitions as text without names, and those that they refer to after them."""

    def __init__(self, tree: Tree):
        self._tree = tree
        self._numbers: dict[_Definition, int] = {}
        self._classes = 0
        self._members: dict[str, list[str]] = {}
        self._texts: list[str] = []

    def text(self) -> str:
        """Return everything that has been written, and everything that this refers to."""
        done = 0
        while done < len(self._numbers):
            definition = list(self._numbers)[done]
            self._texts.append(f"@{done}={self._definition(definition)}")
            done += 1
        # which classes a value may belong to is known only now
        return re.sub(
            "\0(\\w+)\0", lambda match: "|".join(self._members.get(match[1], [match[1]])), "\n".join(self._texts)
        )

    def begin(self, source: Source, function: ast.FunctionDef | None, expression: ast.expr) -> None:
        """Write an expression of a function, or of a module."""
        scope = _scope_of(expression, source) if function is None else _scope_of(function, source)
        self._texts.append(self._node(expression, scope))

    def begin_with(self, reference: str) -> None:
        """Write a definition, given as ``"module:name"``."""
        module, _, name = reference.partition(":")
        self._texts.append(self.refer(module, name))

    def refer(self, module: str, name: str) -> str:
        """Return what stands for a name of a module: a number, or for other packages the full name."""
        source = self._tree.source(module)
        if source is None:
            return f"{module}.{name}" if name else module
        if not name:
            return f"module:{module}"
        meaning = source.meaning(name)
        if meaning is None:
            inner = f"{module}.{name}"
            return f"module:{inner}" if self._tree.source(inner) else inner
        if meaning != (module, name):
            return self.refer(*meaning)
        definition = _Definition(module, name)
        return f"@{self._numbers.setdefault(definition, len(self._numbers))}"

    def _definition(self, definition: _Definition) -> str:
        source = self._tree.source(definition.module)
        assert source is not None
        statements = source.definitions[definition.name]
        return ";".join(self._defining(statement, definition.name, source) for statement in statements)

    def _defining(self, statement: ast.stmt, name: str, source: Source) -> str:
        scope = _scope_of(statement, source)
        if isinstance(statement, ast.FunctionDef):
            return self._function(statement, scope)
        if isinstance(statement, ast.ClassDef):
            return self._class(statement, source)
        if isinstance(statement, ast.Assign):
            target, value = statement.targets[0], statement.value
            if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
                names = [ast.unparse(element) for element in target.elts]
                return self._node(value.elts[names.index(name)], scope)
            if isinstance(target, ast.Name):
                return self._node(value, scope)
        return self._node(statement, scope)

    # --- definitions --------------------------------------------------------------------------------------------------

    def _function(self, node: ast.FunctionDef | ast.Lambda, scope: _Scope) -> str:
        arguments = node.args
        parameters = []
        every = (*arguments.posonlyargs, *arguments.args, arguments.vararg, *arguments.kwonlyargs)
        given = [argument for argument in every if argument is not None]
        jitted = any(_is_constexpr(argument.annotation) for argument in given)
        for argument in given:
            constant = "!" if _is_constexpr(argument.annotation) else ""
            kind = f":{self._tuple(argument.annotation, scope)}" if jitted and argument.annotation else ""
            parameters.append(f"{constant}{scope.number(argument.arg)}{kind.rstrip(':')}")
        if arguments.kwarg is not None:
            parameters.append(f"**{scope.number(arguments.kwarg.arg)}")
        defaults = [self._node(value, scope) for value in (*arguments.defaults, *arguments.kw_defaults) if value]
        head = f"({','.join(parameters)}={','.join(defaults)})"
        if isinstance(node, ast.Lambda):
            return f"lambda{head}[{self._node(node.body, scope)}]"
        decorators = "".join(f"d[{self._node(decorator, scope)}]" for decorator in node.decorator_list)
        return f"{decorators}def{head}{self._body(node.body, scope)}"

    def _tuple(self, annotation: ast.expr, scope: _Scope) -> str:
        """Return what stands for the class of a tuple, whose fields are parameters of a kernel; else an empty text."""
        found = self._defined_by(annotation, scope)
        return self._node(annotation, scope) if found is not None and isinstance(found[1], ast.ClassDef) else ""

    def _class(self, node: ast.ClassDef, source: Source) -> str:
        scope = _Scope(source)
        key, values = self._classes, []
        self._classes += 1
        for position, statement in enumerate(_fields_of(node)):
            self._members.setdefault(ast.unparse(statement.target), []).append(f"field{key}.{position}")
            values.append(self._node(statement.value, scope) if statement.value is not None else "-")
        methods = [statement for statement in node.body if isinstance(statement, ast.FunctionDef)]
        if source.name in _WRAPPERS:
            methods = []
        for position, method in enumerate(methods):
            if not method.name.startswith("__"):
                self._members.setdefault(method.name, []).append(f"method{key}.{position}")
        for position, name in enumerate(_attributes_of(methods)):
            self._members.setdefault(name, []).append(f"attribute{key}.{position}")
        bases = [self._node(base, scope) for base in node.bases]
        bodies = [self._function(method, _scope_of(method, source)) for method in methods]
        return f"class({','.join(bases)})({','.join(values)})[{';'.join(bodies)}]"

    def _body(self, body: list[ast.stmt], scope: _Scope) -> str:
        texts = [self._node(statement, scope) for statement in body if not _says_nothing(statement)]
        return "{" + ";".join(texts) + "}"

    # --- nodes --------------------------------------------------------------------------------------------------------

    def _node(self, node: ast.AST, scope: _Scope) -> str:
        """Write a node and what is in it."""
        match node:
            case ast.Name():
                return self._name(node.id, scope)
            case ast.Attribute():
                return self._attribute(node, scope)
            case ast.Call():
                return self._call(node, scope)
            case ast.Constant():
                return f"{type(node.value).__name__}:{node.value!r}"
            case ast.FunctionDef():
                name = scope.number(node.name)
                return f"{name}:{self._function(node, scope)}"
            case ast.Lambda():
                return self._function(node, scope)
            case ast.Raise():
                return "raise"
            case ast.Assert():
                return f"assert[{self._node(node.test, scope)}]"
            case ast.AnnAssign():
                constant = "!" if _is_constexpr(node.annotation) else ""
                value = self._node(node.value, scope) if node.value is not None else ""
                return f"Assign{constant}({self._node(node.target, scope)},{value})"
            case ast.Assign():
                targets = ",".join(self._node(target, scope) for target in node.targets)
                return f"Assign({targets},{self._node(node.value, scope)})"
            case ast.Import() | ast.ImportFrom():
                return "pass"
        parts = [self._part(getattr(node, key, None), scope) for key in node._fields if key not in _SILENT]
        return f"{type(node).__name__}({','.join(part for part in parts if part)})"

    def _part(self, value: Any, scope: _Scope) -> str:
        """Write a field of a node, which is a node, nodes, a name or a constant."""
        if isinstance(value, list):
            if value and isinstance(value[0], ast.stmt):
                return self._body(value, scope)
            return f"[{','.join(self._node(item, scope) for item in value)}]"
        if isinstance(value, ast.AST):
            return self._node(value, scope)
        if isinstance(value, str) and value in scope.local:  # an exception that is handled
            return f"{scope.number(value)}"
        return "" if value is None else repr(value)

    def _name(self, name: str, scope: _Scope) -> str:
        if name in scope.local:
            return f"{scope.number(name)}"
        if name in scope.imports:
            return self.refer(*scope.imports[name])
        meaning = scope.source.meaning(name)
        return f"builtin:{name}" if meaning is None else self.refer(*meaning)

    def _attribute(self, node: ast.Attribute, scope: _Scope) -> str:
        value = self._node(node.value, scope)
        if value.startswith("module:"):
            return self.refer(value.removeprefix("module:"), node.attr)
        definition = self._defined_by(node.value, scope)
        if definition is not None and isinstance(definition[1], ast.ClassDef):
            for statement in definition[1].body:  # a member of an enumeration, by its value
                if isinstance(statement, ast.Assign) and node.attr in _defined(statement):
                    return f"member[{self._node(statement.value, _Scope(definition[0]))}]"
        if _is_foreign(value):
            return f"{value}.{node.attr}"
        return f"{value}.\0{node.attr}\0"

    def _call(self, node: ast.Call, scope: _Scope) -> str:
        function = self._node(node.func, scope)
        parameters = self._parameters(node.func, scope)
        arguments = [self._node(argument, scope) for argument in node.args]
        for keyword in node.keywords:
            name = keyword.arg or "**"
            if name in parameters:
                name = f"{parameters.index(name)}"
            elif keyword.arg and "\0" in function:  # such as _replace(field=...)
                name = f"\0{name}\0"
            arguments.append(f"{name}={self._node(keyword.value, scope)}")
        return f"{function}({','.join(arguments)})"

    def _parameters(self, function: ast.expr, scope: _Scope) -> list[str]:
        """Return the names of the parameters, or fields, of what is called, if the package defines it."""
        found = self._defined_by(function, scope)
        if found is None:
            return []
        if isinstance(found[1], ast.FunctionDef):
            arguments = found[1].args
            return [one.arg for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
        if isinstance(found[1], ast.ClassDef):
            return [one.target.id for one in _fields_of(found[1]) if isinstance(one.target, ast.Name)]
        return []

    def _defined_by(self, node: ast.expr, scope: _Scope) -> tuple[Source, ast.stmt] | None:
        """Return the source and the last statement that define what an expression names, if the package does."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.insert(0, node.attr)
            node = node.value
        if not isinstance(node, ast.Name) or node.id in scope.local:
            return None
        meaning = scope.imports.get(node.id) or scope.source.meaning(node.id)
        if meaning is None:
            return None
        return find(self._tree, *meaning, parts)


def find(tree: Tree, module: str, name: str, attributes: list[str]) -> tuple[Source, ast.stmt] | None:
    """Return the source and the last statement that define a name, or an attribute of a module; None if none does."""
    source = tree.source(module)
    if source is None:
        return None
    if not name:
        return find(tree, module, attributes[0], attributes[1:]) if attributes else None
    if name in source.definitions:
        return None if attributes else (source, source.definitions[name][-1])
    meaning = source.meaning(name)
    if meaning is not None:
        return find(tree, *meaning, attributes)
    return find(tree, f"{module}.{name}", "", attributes) if tree.source(f"{module}.{name}") else None


def _scope_of(node: ast.AST, source: Source) -> _Scope:
    """Return the scope of a function, where all that it binds is local, or of the inner parts of another statement."""
    names, imports = _bound(node)
    scope = _Scope(source, dict.fromkeys(names))
    for statement in imports:
        scope.imports |= source.imported(statement)
    return scope


@functools.cache
def _bound(node: ast.AST) -> tuple[tuple[str, ...], tuple[ast.stmt, ...]]:
    """Return the names that are local to a node, and the imports in it."""
    names, imports = _inner_names(node), []
    if isinstance(node, ast.FunctionDef):
        for inner in ast.walk(node):
            if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store | ast.Del):
                names.add(inner.id)
            elif isinstance(inner, ast.FunctionDef | ast.ExceptHandler) and inner is not node and inner.name:
                names.add(inner.name)
            elif isinstance(inner, ast.Import | ast.ImportFrom):
                imports.append(inner)
    return tuple(names), tuple(imports)


def _is_foreign(text: str) -> bool:
    """Return whether this stands for what another package defines."""
    return re.fullmatch(r"[A-Za-z_][\w.]*", text) is not None


def _fields_of(node: ast.ClassDef) -> list[ast.AnnAssign]:
    return [statement for statement in node.body if isinstance(statement, ast.AnnAssign)]


def _attributes_of(methods: list[ast.FunctionDef]) -> list[str]:
    """Return the attributes that methods give to their object, in the order of the code."""
    found: dict[str, tuple[int, int]] = {}
    for method in methods:
        for node in ast.walk(method):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                owner = method.args.args[0].arg if method.args.args else ""
                if ast.unparse(node.value) == owner:
                    found.setdefault(node.attr, (node.lineno, node.col_offset))
    return sorted(found, key=found.__getitem__)


def _is_constexpr(annotation: ast.expr | None) -> bool:
    return annotation is not None and "constexpr" in ast.unparse(annotation)


def _says_nothing(statement: ast.stmt) -> bool:
    """Return whether a statement is a text, or an annotation without a value."""
    if isinstance(statement, ast.Expr):
        return isinstance(statement.value, ast.Constant) and isinstance(statement.value.value, str)
    return isinstance(statement, ast.AnnAssign) and statement.value is None


# --- fingerprints -----------------------------------------------------------------------------------------------------


def of_module(tree: Tree, module: str) -> str:
    """Return the fingerprint of all that a module of kernels defines: the kernels, and the code that launches them."""
    source = _source(tree, module)
    writer = _Writer(tree)
    for name in sorted(source.definitions, key=lambda name: source.definitions[name][0].lineno):
        if any(isinstance(one, ast.FunctionDef | ast.ClassDef) for one in source.definitions[name]):
            writer.refer(module, name)
    return _digest(writer)


def of_launch(tree: Tree, reference: str, *common: str) -> str:
    """Return the fingerprint of the kernel that a function ``bind(plan, context)`` launches.

    It covers the first argument of each ``context.launch(kernel, ...)``, the values of constants that it is given as
    ``NAME.value``, and the ``options`` of the compilation, in this function and in those that it gives its context to.

    Args:
        reference: ``"module:bind"``.
        common: ``"module:name"`` of constants that are part of every compilation.
    """
    writer = _Writer(tree)
    source, bind = _function(tree, reference)
    for function, call in _launches(source, bind, bind.args.args[1].arg):
        writer.begin(source, function, call.args[0])
        for keyword in call.keywords:
            if keyword.arg == "options":
                writer.begin(source, function, _value(function, keyword.value))
            elif isinstance(keyword.value, ast.Attribute) and keyword.value.attr == "value":
                writer.begin(source, function, keyword.value)  # of a tl.constexpr, by which one kernel serves several
    for constant in common:
        writer.begin_with(constant)
    return _digest(writer)


def of_host_call(tree: Tree, reference: str, *common: str) -> str:
    """Return the fingerprint of the schedule and the arithmetic of a ``HostCall(...)``, given as ``"module:NAME"``."""
    source, statement = _statement(tree, reference)
    writer = _Writer(tree)
    call = getattr(statement, "value", None)
    keywords = {keyword.arg: keyword.value for keyword in call.keywords} if isinstance(call, ast.Call) else {}
    if "schedule" not in keywords:
        raise ValueError(f"{reference} is not a call of HostCall with a schedule")
    for name, value in keywords.items():
        if name in ("schedule", "arithmetic"):
            writer.begin(source, None, value)
    for constant in common:
        writer.begin_with(constant)
    return _digest(writer)


def _digest(writer: _Writer) -> str:
    text = writer.text()
    if not text:
        raise ValueError("there is no kernel to make a fingerprint of")
    return hashlib.sha256(text.encode()).hexdigest()[:_LENGTH]


def _source(tree: Tree, module: str) -> Source:
    source = tree.source(module)
    if source is None:
        raise ValueError(f"there is no source of {module}")
    return source


def _statement(tree: Tree, reference: str) -> tuple[Source, ast.stmt]:
    module, _, name = reference.partition(":")
    found = find(tree, module, name, [])
    if found is None:
        raise ValueError(f"there is no source of {reference}")
    return found


def _function(tree: Tree, reference: str) -> tuple[Source, ast.FunctionDef]:
    source, statement = _statement(tree, reference)
    if not isinstance(statement, ast.FunctionDef) or not statement.args.args:
        raise ValueError(f"{reference} is not a function bind(plan, context)")
    return source, statement


def _launches(source: Source, bind: ast.FunctionDef, context: str) -> Iterator[tuple[ast.FunctionDef, ast.Call]]:
    """Yield the calls of ``context.launch(kernel, ...)``, each with its function: ``bind``, or one that it calls."""
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
    """Return the expression that a local name was assigned, or the expression itself."""
    if isinstance(expression, ast.Name):
        for node in ast.walk(function):
            if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == [expression.id]:
                return node.value
    return expression


@functools.cache
def installed() -> Tree:
    """Return the sources of this package as it is imported."""
    return Tree(Path(__file__).parents[1])
