"""Sphinx settings of the site: Markdown pages, a page per method, the state of every cell of the papers' tables."""

from __future__ import annotations

import sys
from pathlib import Path

from sphinx.application import Sphinx

DOCS = Path(__file__).parent
sys.path[:0] = [str(DOCS.parent), str(DOCS)]

import generated_pages  # noqa: E402

import cfl  # noqa: E402

project = "cfl"
author = "The cfl developers"
copyright = author
release = cfl.__version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"cfl {release}"
highlight_language = "none"

myst_heading_anchors = 4

nb_execution_mode = "force"  # the notebook holds no results, so that none is out of date
nb_execution_in_temp = True
nb_execution_raise_on_error = True
nb_execution_timeout = 120
nb_merge_streams = True

autodoc_typehints = "none"
autodoc_member_order = "bysource"
autoclass_content = "class"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True


def setup(app: Sphinx) -> None:
    """Write the generated pages before Sphinx looks for its sources."""
    app.connect("builder-inited", lambda _: generated_pages.write(DOCS / "generated"))
