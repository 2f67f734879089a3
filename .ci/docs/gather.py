"""Gather the sources of the documentation site: pages, the files that they link, and API pages.

python .ci/docs/gather.py build/docs/source
"""

import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("configs", "pl_fed", "experiments")
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s#]+)")
GUIDES = {
    "Use": ["README", "configs/README", "pl_fed/README", "pl_fed/command/README"],
    "Bring your own": [f"pl_fed/{room}/README" for room in ("tasks", "data", "models", "clients")],
    "Data splits, attacks, defences": [
        f"pl_fed/{room}/README" for room in ("partitioners", "attacks", "aggregators")
    ],
    "Run and read": [
        f"pl_fed/{room}/README" for room in ("engine", "reports", "loggers", "exports")
    ],
    "Experiments": ["experiments/README", "experiments/tutorials/README"],
}
ROOMS = (
    *("clients", "tasks", "aggregators", "attacks", "partitioners", "skews", "samplers"),
    *("optimizers", "models", "data", "metrics", "callbacks", "loggers", "functional"),
)
MAIN_CLASSES = ("Trainer", "Federation", "Adversary", "EngineOptions", "StorageOptions")


def find_pages() -> list[Path]:
    """Return all Markdown files of the repository that readers see."""
    pages = [*ROOT.glob("*.md")]
    for folder in FOLDERS:
        pages += (ROOT / folder).rglob("*.md")
    return sorted(page for page in pages if page.name not in ("head.md", "notes.md"))


def linked_files(page: Path) -> list[Path]:
    """Return the files of the repository that a page links."""
    targets = [(page.parent / link).resolve() for link in LINK.findall(page.read_text())]
    return [target for target in targets if target.is_file() and ROOT in target.parents]


def copy(path: Path, sources: Path) -> None:
    """Copy a file of the repository to the same place among the sources."""
    target = sources / path.relative_to(ROOT)
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(path, target)


def toctree(names: list[str], caption: str = "") -> str:
    """Return a table of contents."""
    head = f":caption: {caption}\n" if caption else ""
    return f"```{{toctree}}\n{head}:maxdepth: 1\n\n" + "\n".join(names) + "\n```\n"


def room_page(room: str) -> str:
    """Return the API page of a room: a table of its classes and functions, then each of them."""
    import importlib

    module = importlib.import_module(f"pl_fed.{room}")
    names = sorted(name for name in vars(module) if is_public(module, name))
    members = "\n".join(f"   {name}" for name in names)
    summary = f"```{{eval-rst}}\n.. currentmodule:: pl_fed.{room}\n\n.. autosummary::\n\n{members}\n"
    details = "".join(f"\n.. {directive(getattr(module, name))}:: {name}\n" for name in names)
    return f"# pl_fed.{room}\n\n{(module.__doc__ or '').strip()}\n\n{summary}{details}```\n"


def is_public(module: object, name: str) -> bool:
    """Return whether a module's member is a class or function of the package."""
    member = getattr(module, name)
    return not name.startswith("_") and callable(member) and hasattr(member, "__module__")


def directive(member: object) -> str:
    """Return the directive that documents a class or a function."""
    return "autoclass" if isinstance(member, type) else "autofunction"


def main_page() -> str:
    """Return the API page of the classes at the top of the package."""
    members = "\n".join(f"   {name}" for name in MAIN_CLASSES)
    details = "".join(f"\n.. autoclass:: {name}\n" for name in MAIN_CLASSES)
    summary = "```{eval-rst}\n.. currentmodule:: pl_fed\n\n.. autosummary::\n\n"
    return f"# pl_fed\n\n{summary}{members}\n{details}```\n"


def main(sources: Path) -> None:
    """Write all sources into a new folder."""
    shutil.rmtree(sources, ignore_errors=True)
    pages = find_pages()
    for path in {*pages, *(file for page in pages for file in linked_files(page))}:
        copy(path, sources)
    (sources / "api").mkdir()
    (sources / "api" / "pl_fed.md").write_text(main_page())
    for room in ROOMS:
        (sources / "api" / f"{room}.md").write_text(room_page(room))
    guides = [toctree(names, caption) for caption, names in GUIDES.items()]
    listed = {name for names in GUIDES.values() for name in names}
    others = [str(page.relative_to(ROOT).with_suffix("")) for page in pages]
    more = toctree([name for name in others if name not in listed], "More pages")
    api = toctree(["api/pl_fed", *(f"api/{room}" for room in ROOMS)], "API reference")
    hidden = [tree.replace(":maxdepth: 1", ":maxdepth: 1\n:hidden:") for tree in guides]
    start = "# pl_fed\n\nBegin with the [first page](README.md), or the [Python API](api/pl_fed.md).\n\n"
    (sources / "index.md").write_text(start + "\n".join([*hidden, api, more]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
