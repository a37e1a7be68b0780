"""The notebook of the documentation runs to its end, in a kernel of its own."""

from __future__ import annotations

from pathlib import Path

import nbformat
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[2] / "docs" / "notebook.ipynb"


def test_every_cell_runs_and_pictures_are_shown(tmp_path: Path) -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs for cell in cells), "results are made when the site is built"
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    kinds = [kind for cell in cells for output in cell.outputs for kind in output.get("data", {})]
    assert kinds.count("image/png") == 2
    texts = [output["text"] for cell in cells for output in cell.outputs if output.output_type == "stream"]
    assert any("last ACC" in text for text in texts), "progress"
    assert texts[-1].startswith("methods.fot.threshold = 1.5 cannot work"), "a mistake ends no kernel"
