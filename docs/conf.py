"""How Sphinx makes the pages; `make docs` runs it, and a warning is an error."""

from __future__ import annotations

import runpy
from pathlib import Path

from horovod_runner import __version__

# Pages of the notebooks, before Sphinx looks for pages.
runpy.run_path(str(Path(__file__).parent / "notebook_pages.py"))["write"]()

project = "horovod_runner"
author = "The horovod_runner developers"
project_copyright = author
release = version = __version__
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinxcontrib.mermaid",
]
html_theme = "furo"
html_title = f"horovod_runner {version}"
html_static_path = ["_static"]
html_css_files = ["pages.css"]
exclude_patterns = ["_build"]
myst_heading_anchors = 3
myst_fence_as_directive = ["mermaid"]
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
napoleon_use_ivar = True
napoleon_use_rtype = False
