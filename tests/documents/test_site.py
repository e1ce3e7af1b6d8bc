"""The site of the documentation: its navigation, its docstrings, and that it is built without a warning."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from pages import PAGES, ROOT

import shotcast
from shotcast import overlap


@pytest.fixture(scope="module")
def conf() -> ModuleType:
    spec = importlib.util.spec_from_file_location("conf", ROOT / "docs" / "conf.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def linked() -> set[Path]:
    """Return the documents that pages link to."""
    return {
        (page.parent / target).resolve()
        for page in PAGES
        for target in re.findall(r"\]\(([\w./-]+\.md)[)#]", page.read_text())
    }


def test_the_navigation_leads_to_every_page(conf: ModuleType) -> None:
    trees = conf.navigation()
    listed = {line for line in trees.splitlines() if line and not line.startswith(("`", ":"))}
    pages = {page.relative_to(ROOT).with_suffix("").as_posix() for page in {*PAGES, *linked()}}
    assert pages - listed == {"README"}
    assert [*re.findall(r":caption: (.*)", trees)][:3] == ["Tutorials", "Guides", "Reference"]


def test_every_page_is_a_source(conf: ModuleType) -> None:
    sources = {page for pattern in conf.include_patterns for page in ROOT.glob(pattern)}
    assert {*PAGES, *linked()} <= sources


def test_docstrings_of_every_public_name_are_shown(conf: ModuleType) -> None:
    shown = set(re.findall(r"^\.\. auto(?:class|function):: shotcast\.(\S+)", conf.docstrings(), re.MULTILINE))
    assert {name for name in shotcast.__all__ if name != "__version__"} <= shown
    assert {f"overlap.{name}" for name in overlap.__all__ if callable(getattr(overlap, name))} <= shown
    assert {"engine.config.EngineConfig", "engine.outputs.RequestOutput", "errors.EngineDead"} <= shown


def test_the_workflow_publishes_what_make_builds() -> None:
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "site.yml").read_text())["jobs"]
    (command,) = [step["run"] for step in jobs["build"]["steps"] if "run" in step]
    assert command.startswith("make site ")
    (path,) = [step["with"]["path"] for step in jobs["build"]["steps"] if "upload-pages" in step.get("uses", "")]
    makefile = (ROOT / "Makefile").read_text()
    recipe = re.search(r"^site: .*\n((?:\t.*\n)+)", makefile, re.MULTILINE)
    assert recipe is not None
    assert recipe[1].split()[-1] == path
    assert re.search(r"^TORCH \?= (.*)", makefile, re.MULTILINE)[1] in command, "another PyTorch than the Makefile's"
    assert jobs["publish"]["needs"] == "build"
    assert jobs["publish"]["if"] == "github.event_name == 'push'"


@pytest.mark.full
def test_it_is_built_without_a_warning(tmp_path: Path) -> None:
    """Links, anchors, directives and cross-references of docstrings are right; a reader finds a word of any page."""
    pytest.importorskip("sphinx", reason="pip install 'shotcast[docs]'")
    site = tmp_path / "site"
    command = [
        sys.executable,
        "-m",
        "sphinx",
        "-W",
        "--keep-going",
        "-q",
        "-c",
        "docs",
        "-d",
        tmp_path / "t",
        ".",
        site,
    ]
    built = subprocess.run(command, capture_output=True, text=True, timeout=500, cwd=ROOT)
    assert built.returncode == 0, built.stderr
    names = {page.relative_to(site).with_suffix("").as_posix() for page in site.rglob("*.html")}
    assert {page.relative_to(ROOT).with_suffix("").as_posix() for page in PAGES} <= names
    assert "url=README.html" in (site / "index.html").read_text()
    text = (site / "docs" / "reference" / "docstrings.html").read_text()
    for anchor in ("shotcast.Communicator.all_reduce", "shotcast.spawn", "shotcast.engine.config.EngineConfig"):
        assert f'id="{anchor}"' in text
    assert "batch_invari" in (site / "searchindex.js").read_text()
