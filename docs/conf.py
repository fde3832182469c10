"""The settings of the documentation site, which `make docs` builds from the repository's root."""

import os
import re
import sys
from pathlib import Path

import jupytext

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / folder) for folder in ("docs", "", "python_api")]

project = html_title = "partkernels"
root_doc = "docs/index"
include_patterns = ["docs/**", "benchmarks/results/*.md", "CONTRIBUTING.md", "CHANGELOG.md"]
exclude_patterns = [".*", "build", "out"]
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "reference",  # uses an event of autodoc
]

html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_copyright = False
copybutton_exclude = ".gp, .go"  # prompts and output

myst_heading_anchors = 4
nb_execution_mode = "force" if os.environ.get("FULL") else "off"
nb_execution_raise_on_error = True
nb_execution_timeout = 600
nb_merge_streams = True
nb_output_stderr = "remove"  # progress bars

default_role = "code"  # docstrings write `name`
suppress_warnings = ["ref.python"]  # a type in a signature that several modules export
python_maximum_signature_line_length = 90
autosummary_generate = False
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
autodoc_mock_imports = ["flwr", "lightning", "transformers", "triton"]  # optional, and slow to import
napoleon_custom_sections = ["Shapes", ("Attributes", "params_style")]


def link_notebook(app, page, source) -> None:
    """Convert a notebook's page to a file, and link to it under the title."""
    if page.startswith("docs/notebooks/"):
        target = Path(app.outdir, "_downloads", Path(page).name).with_suffix(".ipynb")
        target.parent.mkdir(parents=True, exist_ok=True)
        jupytext.write(jupytext.reads(source[0], "md:myst"), target)
        link = f'<a class="notebook" href="../../_downloads/{target.name}" download>Download as a Jupyter notebook</a>'
        source[0] = re.sub(r"(?m)^(# .*)$", rf"\1\n\n{link}", source[0], count=1)


def redirect(app, error) -> None:
    """Let the site's root lead to its first page."""
    Path(app.outdir, "index.html").write_text('<meta http-equiv="refresh" content="0; url=docs/index.html">\n')


def setup(app) -> None:
    app.connect("source-read", link_notebook)
    app.connect("build-finished", redirect)
