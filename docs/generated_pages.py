"""Pages that are made when the site is built: one per method, and the state of every cell of the papers' tables."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import get_args

import yaml

import cfl.methods
from cfl.data.scenarios import Scenario
from cfl.methods import Method
from cfl.papers.definition import papers
from cfl.papers.reproducibility import page
from cfl.running.resolving import Resolver
from cfl.runtime.atomic_write import write_whole

ROOT = Path(__file__).parents[1]


def write(folder: Path) -> None:
    """Write all generated pages below a folder. A page that has not changed is not written, nor read again by Sphinx.

    Args:
        folder: ``docs/generated``.
    """
    methods = folder / "methods"
    methods.mkdir(parents=True, exist_ok=True)
    wanted = {methods / f"{name}.rst": method_page(name) for name in cfl.methods.__all__}
    for left in set(methods.glob("*.rst")) - wanted.keys():
        left.unlink()
    for path, text in wanted.items():
        if not path.is_file() or path.read_text() != text:
            write_whole(path, text)
    cells = folder / "reproducibility.md"
    if not cells.is_file() or cells.stat().st_mtime < _newest():
        write_whole(cells, page(papers(), Resolver()))


def method_page(name: str) -> str:
    """The page of one class of ``cfl.methods``: where it is, how it is used, and its docstring.

    Args:
        name: of the class.
    """
    method: type[Method] = getattr(cfl.methods, name)
    source = Path(inspect.getfile(method)).relative_to(ROOT)
    lines = [name, "=" * len(name), ""]
    if method is not Method:
        files = ", ".join(f"``{path}``" for path in _configurations().get(name, []))
        scenarios = ", ".join(scenario for scenario in get_args(Scenario) if scenario in method.scenarios)
        lines += [f"- Configuration: {files}" if files else "- Configuration: none of its own"]
        lines += [f"- Scenarios: {scenarios}"]
    lines += [f"- Source: ``{source}``", "", f".. autoclass:: cfl.methods.{name}"]
    if method is Method:
        lines += ["   :members:"]
    return "\n".join(lines) + "\n"


def _configurations() -> dict[str, list[str]]:
    """Class -> the files of ``configs/methods`` that name it."""
    found: dict[str, list[str]] = {}
    for path in sorted((ROOT / "configs" / "methods").glob("*.yaml")):
        for method in (yaml.safe_load(path.read_text()).get("methods") or {}).values():
            found.setdefault(method["class_path"].rpartition(".")[2], []).append(f"configs/methods/{path.name}")
    return found


def _newest() -> float:
    """When anything was last changed that the page of the cells is made of: code, configurations, kept runs."""
    paths = (path for folder in ("cfl", "configs") for path in (ROOT / folder).rglob("*"))
    return max(path.stat().st_mtime for path in paths if "__pycache__" not in path.parts)
