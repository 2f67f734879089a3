"""Gather the sources of the documentation site: pages, the files that they link, and API pages.

python .ci/docs/gather.py build/docs/source
"""

import importlib
import inspect
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("configs", "pl_fed", "experiments")
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s#]+)")
GUIDES = {
    "Use": [
        *("configs/README", "pl_fed/README", "pl_fed/command/README", "pl_fed/studies/README"),
    ],
    "Bring your own": [f"pl_fed/{room}/README" for room in ("tasks", "data", "models", "clients")],
    "Data splits, attacks, defences, compression": [
        f"pl_fed/{room}/README"
        for room in ("partitioners", "attacks", "aggregators", "compressors")
    ],
    "Run and read": [
        f"pl_fed/{room}/README"
        for room in ("engine", "reports", "statistics", "loggers", "exports", "privacy", "systems")
    ],
    "Experiments": [
        "experiments/README",
        "experiments/tutorials/README",
        "experiments/bring_your_own/README",
    ],
}
ROOMS = (
    *("clients", "tasks", "aggregators", "attacks", "compressors", "partitioners", "skews"),
    *("samplers", "systems"),
    *("optimizers", "models", "data", "metrics", "privacy", "callbacks", "loggers", "functional"),
    "statistics",
)
MAIN_CLASSES = ("Trainer", "Study", "Federation", "Adversary", "EngineOptions", "StorageOptions")
TYPES = ("Batch", "ClientContext", "RoundContext", "Population")


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
    if path.suffix == ".md":
        text = link_to_index(path)
        named = re.search(r"^# ", text, flags=re.MULTILINE)
        title = "" if named else f"# {path.parent.name}: {path.stem}\n\n"
        target.write_text(title + text)
    else:
        shutil.copyfile(path, target)


def link_to_index(page: Path) -> str:
    """Return a page's text. The first page of the repository is the index of the site."""

    def replace(match: re.Match[str]) -> str:
        first = (page.parent / match[1]).resolve() == ROOT / "README.md"
        return match[0].replace("README.md", "index.md") if first else match[0]

    return LINK.sub(replace, page.read_text())


def toctree(names: list[str], caption: str) -> str:
    """Return a table of contents for the sidebar."""
    options = f":caption: {caption}\n:maxdepth: 1\n:hidden:\n"
    return f"```{{toctree}}\n{options}\n" + "\n".join(names) + "\n```\n"


def api_page(name: str, members: Sequence[str] = ()) -> str:
    """Return the API page of a module: a table of its members, then each of them."""
    module = importlib.import_module(name)
    members = members or sorted(member for member in vars(module) if is_public(module, member))
    summary = "\n".join(f"   {member}" for member in members)
    details = "".join(f"\n.. {directive(getattr(module, m))}:: {m}\n" for m in members)
    directives = f".. py:module:: {name}\n\n.. autosummary::\n\n{summary}\n{details}"
    doc = inspect.getdoc(module) or ""
    return f"# {name}\n\n{doc}\n\n```{{eval-rst}}\n{directives}```\n"


def is_public(module: object, name: str) -> bool:
    """Return whether a module's member is a class or function of the package."""
    member = getattr(module, name)
    return not name.startswith("_") and callable(member) and hasattr(member, "__module__")


def directive(member: object) -> str:
    """Return the directive that documents a class or a function."""
    return "autoclass" if isinstance(member, type) else "autofunction"


def main(sources: Path) -> None:
    """Write all sources into a new folder."""
    shutil.rmtree(sources, ignore_errors=True)
    pages = find_pages()
    for path in {*pages, *(file for page in pages for file in linked_files(page))}:
        copy(path, sources)
    first = (sources / "README.md").rename(sources / "index.md")
    (sources / "api").mkdir()
    api = {
        "pl_fed": api_page("pl_fed", MAIN_CLASSES),
        "types": api_page("pl_fed.types", TYPES),
        **{room: api_page(f"pl_fed.{room}") for room in ROOMS},
    }
    for name, text in api.items():
        (sources / "api" / f"{name}.md").write_text(text)
    others = [str(page.relative_to(ROOT).with_suffix("")) for page in pages]
    listed = {"README", *(name for names in GUIDES.values() for name in names)}
    contents = {
        **GUIDES,
        "API reference": ["api/pl_fed", "api/types", *(f"api/{room}" for room in ROOMS)],
        "More pages": [name for name in others if name not in listed],
    }
    trees = [toctree(names, caption) for caption, names in contents.items()]
    first.write_text("\n".join([first.read_text(), *trees]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
