"""Sphinx: the README.md files of all folders and the docstrings as one site. See `make docs`."""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

project = "pl_fed"
copyright = "the authors of pl_fed"
extensions = ["sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.napoleon"]
extensions += ["sphinx.ext.viewcode", "myst_parser"]
html_theme = "furo"
html_title = "pl_fed"
html_copy_source = False

# pages: anchors of headings as code hosts form them
myst_heading_anchors = 3
myst_enable_extensions = ["smartquotes"]

# docstrings: Google style, types beside the documented arguments only
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_custom_sections = [("Shape", "params_style")]
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_class_signature = "mixed"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "show-inheritance": True}
autosummary_generate = False
add_module_names = False
python_use_unqualified_type_names = True

# A role that leads nowhere is an error, unless it names another package. Set PL_FED_DOCS_ONLINE to
# link these names too, which reads the inventories of other sites.
nitpicky = True
OTHERS = r"(torch|lightning|torchmetrics|numpy|collections|pathlib|typing|jsonargparse|matplotlib)"
nitpick_ignore_regex = [
    (r"py:.*", rf"{OTHERS}\b.*"),
    (r"py:class", r"[\[\]A-Za-z_., |]*[\[\], |][\[\]A-Za-z_., |]*"),
]
if os.environ.get("PL_FED_DOCS_ONLINE"):
    extensions.append("sphinx.ext.intersphinx")
    intersphinx_mapping = {
        "python": ("https://docs.python.org/3", None),
        "torch": ("https://docs.pytorch.org/docs/stable", None),
        "lightning": ("https://lightning.ai/docs/pytorch/stable", None),
    }
