"""Sphinx: the README.md files of all folders and the docstrings as one site. See `make docs`."""

import inspect
import os
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

project = "pl_fed"
copyright = "the authors of pl_fed"
extensions = ["sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.napoleon"]
extensions += ["myst_parser"]
html_theme = "furo"
html_title = "pl_fed"
html_copy_source = False

# pages: anchors of headings as code hosts form them
myst_heading_anchors = 3
myst_enable_extensions = ["smartquotes"]

HIDDEN = "\ue000"  # a character for private use
REFERENCE = "    **kwargs: The other arguments of :class:`Client`."  # in a docstring

# docstrings: Google style, types beside the documented arguments only
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True
napoleon_custom_sections = ["Shape"]
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
    (r"py:class", r"(abc|contextlib)\..*"),
    (r"py:class", r"pl_fed\.([a-z_]+\.){1,2}[A-Z]\w+"),  # types inside the package
]
if os.environ.get("PL_FED_DOCS_ONLINE"):
    extensions.append("sphinx.ext.intersphinx")
    intersphinx_mapping = {
        "python": ("https://docs.python.org/3", None),
        "torch": ("https://docs.pytorch.org/docs/stable", None),
        "lightning": ("https://lightning.ai/docs/pytorch/stable", None),
    }


def show_arguments(*arguments: Any) -> tuple[str, str] | None:
    """Show the arguments of ``__init__`` in place of those of ``__new__``.

    Args:
        *arguments: Those of Sphinx's event ``autodoc-process-signature``: the application, the kind
            of object, its name, the object, and more.
    """
    kind, member = arguments[1], arguments[3]
    if kind != "class" or member.__init__ is object.__init__:
        return None
    parameters = list(inspect.signature(member.__init__).parameters.values())[1:]
    if all(
        parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        for parameter in parameters
    ):
        return "()", ""  # of torch's modules, which take no arguments
    plain = [parameter.replace(annotation=parameter.empty) for parameter in parameters]
    return str(inspect.Signature(plain)), ""


def list_inherited_arguments(*arguments: Any) -> None:
    """List the arguments of ``Client`` in place of a reference to them.

    An argument that the docstring lists itself, because it means more there, is left out.
    """
    lines = arguments[-1]
    if REFERENCE not in lines:
        return
    from pl_fed.clients import Client

    place = lines.index(REFERENCE)
    listed = {line.partition(":")[0] for line in lines[:place]} | {"    models"}  # set by the class
    documented = (inspect.getdoc(Client) or "").partition("Args:\n")[2].partition("\n\n")[0]
    entries = re.split(r"\n(?=    \w)", documented)
    others = [entry for entry in entries if entry.partition(":")[0] not in listed]
    lines[place : place + 1] = "\n".join(others).splitlines()


def hide_colon(*arguments: Any) -> None:
    """Hide the colons of an attribute's text, which napoleon takes for the end of a type."""
    if arguments[1] in ("attribute", "property"):
        arguments[-1][:] = [line.replace(": ", HIDDEN) for line in arguments[-1]]


def show_colon(*arguments: Any) -> None:
    """Show the colons that :func:`hide_colon` has hidden."""
    arguments[-1][:] = [line.replace(HIDDEN, ": ") for line in arguments[-1]]


def setup(app: Any) -> None:
    """Connect the hooks; napoleon has priority 500."""
    app.connect("autodoc-process-signature", show_arguments)
    app.connect("autodoc-process-docstring", list_inherited_arguments, priority=300)
    app.connect("autodoc-process-docstring", hide_colon, priority=400)
    app.connect("autodoc-process-docstring", show_colon, priority=600)
