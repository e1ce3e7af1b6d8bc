"""The entry points of this package, for tests of programs that find them: an editable install may have older ones."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def environment(folder: Path) -> dict[str, str]:
    """Return the environment of a process that finds the package, and its entry points in ``folder``."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    installed = folder / "entry_points" / "shotcast_as_installed-0.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: shotcast-as-installed\nVersion: 0\n")
    lines = []
    for group, points in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in points.items()), ""]
    (installed / "entry_points.txt").write_text("\n".join(lines))
    path = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")]), str(installed.parent)]
    return dict(os.environ) | {"PYTHONPATH": os.pathsep.join(path)}
