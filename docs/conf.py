"""How the documentation is built: `sphinx-build -W --keep-going -b html docs docs/_build/html`.

Figures are made by the library itself (`figures.py`) before pages are read, into `_generated`, which is not committed.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from figures import make_figures  # noqa: E402  (it stands beside this file)

from lowtide.version import __version__  # noqa: E402

project = "Lowtide"
author = "The Lowtide maintainers"
copyright = "The Lowtide maintainers, MIT licence"  # noqa: A001  (Sphinx's word)
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build", "_generated", "decisions/README.md"]

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # signatures would be longer than what they say; arguments are described below them
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False

html_theme = "furo"
html_title = f"Lowtide {__version__}"
html_static_path = ["_static"]
html_css_files = ["wrap.css"]
html_show_sourcelink = False
html_copy_source = False
html_theme_options = {
    "light_css_variables": {
        "color-brand-primary": "#0b5c8a",
        "color-brand-content": "#0b5c8a",
        "font-stack": "system-ui, -apple-system, 'Segoe UI', 'Liberation Sans', Arial, sans-serif",
    },
    "dark_css_variables": {"color-brand-primary": "#7cc4ee", "color-brand-content": "#7cc4ee"},
}
pygments_style = "friendly"
pygments_dark_style = "github-dark"


def as_restructured_text(*given: Any) -> None:
    """Docstrings put code between single backquotes, and use bars as in mathematics; here is what Sphinx wants."""
    lines: list[str] = given[-1]
    for k, line in enumerate(lines):
        parts = re.split(r"`([^`]+)`", line)
        for place in range(0, len(parts), 2):
            parts[place] = parts[place].replace("|", "\\|")
            if place and parts[place][:1].isalnum():
                parts[place] = "\\ " + parts[place]
        lines[k] = "".join(f"``{part}``" if place % 2 else part for place, part in enumerate(parts))


def setup(app: Any) -> None:
    """Make the figures before any page is read, and read docstrings as they are written."""
    app.connect("builder-inited", lambda app: make_figures(Path(app.srcdir) / "_generated"))
    app.connect("autodoc-process-docstring", as_restructured_text, priority=400)  # before napoleon's
