"""The site of the documentation: its pages are those of the repository, and docstrings of public names.

``make site`` builds it. What the index (docs/README.md) lists is the navigation.
"""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import shotcast

ROOT = Path(__file__).parents[1]

project = "shotcast"
release = shotcast.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "README"
include_patterns = ["*.md", "docs/*.md", "docs/*/*.md", "benchmarks/*.md", "research/*.md", "research/*/*.md"]
include_patterns += ["tests/protocols/README.md"]
myst_heading_anchors = 4
autodoc_typehints = "none"
napoleon_use_ivar = True
html_theme = "furo"
html_title = "shotcast"
html_copy_source = False

_FOREIGN = "object,Exception,BaseException,RuntimeError,TypeError,ValueError,tuple,Module"
"""Classes whose members are not ours."""


def navigation() -> str:
    """Return a hidden tree for each section of the index, with the pages that it lists."""
    trees = ["```{toctree}\n:hidden:\n\ndocs/README\n```"]
    index = ROOT / "docs" / "README.md"
    for section in re.split(r"^## ", index.read_text(), flags=re.MULTILINE)[1:]:
        caption = section.partition("\n")[0].partition(":")[0]
        pages = dict.fromkeys(re.findall(r"\]\(([\w./-]+)\.md\)", section))
        listed = "\n".join((index.parent / page).resolve().relative_to(ROOT).as_posix() for page in pages)
        trees.append(f"```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{listed}\n```")
    return "\n\n".join(trees)


def docstrings() -> str:
    """Return directives for every public name, by module, and for the classes that the page links to."""
    text = (ROOT / "docs" / "reference" / "docstrings.md").read_text()
    linked = re.findall(r"\[`(\w+)`\]\(\.\./\.\./src/(shotcast/[\w/]+)\.py\)", text)
    named = {name: [*getattr(shotcast, name).__all__] for name in ("functional", "overlap", "process_group")}
    modules = {"shotcast": list(shotcast.__all__)} | {f"shotcast.{name}": names for name, names in named.items()}
    for name, file in linked:
        if name not in shotcast.__all__:
            modules.setdefault(file.replace("/", "."), []).append(name)
    lines = []
    for module, names in modules.items():
        lines += [module, "-" * len(module), ""]
        for name in names:
            value = getattr(importlib.import_module(module), name)
            if inspect.isclass(value):
                lines += [f".. autoclass:: {module}.{name}", "   :members:", f"   :inherited-members: {_FOREIGN}", ""]
            elif callable(value):
                lines += [f".. autofunction:: {module}.{name}", ""]
    return "\n".join(("```{eval-rst}", *lines, "```"))


def _complete(app: Any, page: str, source: list[str]) -> None:
    """Add what the repository does not hold twice."""
    if page == root_doc:
        source[0] += f"\n\n{navigation()}\n"
    elif page == "docs/reference/docstrings":
        source[0] += f"\n\n{docstrings()}\n"


def _lead_to_the_first_page(app: Any, error: Exception | None) -> None:
    if error is None and app.builder.name == "html":
        target = f'<meta http-equiv="refresh" content="0; url={root_doc}.html">'
        Path(app.outdir, "index.html").write_text(f"<!doctype html>{target}\n")


def setup(app: Any) -> None:
    app.connect("source-read", _complete)
    app.connect("build-finished", _lead_to_the_first_page)
