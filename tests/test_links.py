"""Links and names of files in all pages lead somewhere."""

import re
from pathlib import Path

import pytest
from pages import FENCE, ROOT, Page, find_pages

PAGES = find_pages()
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
PATH = re.compile(r"^[\w.\-]+(/[\w.\-]+)*\.(py|md|yaml|csv|png)$")  # in code, within a line
WRITTEN_BY_A_RUN = {  # files of a run's folder, or of the reader's own
    *("config.yaml", "python_config.yaml", "metrics.csv", "per_client.csv", "per_class.csv"),
    *("per_client_validation.csv", "predictions.csv", "patients.csv", "split.csv"),
    *("metrics_before.csv", "results.csv", "tuning.csv", "tuned.csv", "cells.csv"),
    *("per_group.csv", "group.npy", "comparisons.csv", "benefit.csv", "benefit_clients.csv"),
}


def anchors(page: Page) -> set[str]:
    """Return the anchors of a page's headings, as code hosts form them."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.text), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Page) -> list[str]:
    """Return the links of a page within the repository without a target."""
    broken = []
    for link in LINK.findall(page.prose):
        if re.match(r"[a-z]+:", link):  # an address in the web: not checked
            continue
        name, _, anchor = link.partition("#")
        target = (page.path.parent / name).resolve() if name else page.path
        found = target.exists() and ROOT in [target, *target.parents]
        if not found or (anchor and anchor not in anchors(Page(target))):
            broken.append(link)
    return broken


def missing_files(page: Page) -> list[str]:
    """Return the files that a page names in code, and that are not in the repository."""
    names = re.findall(r"`([^`\n]+)`", FENCE.sub("", page.text))
    folders = (page.path.parent, ROOT, ROOT / "pl_fed")
    return [
        name
        for name in names
        if PATH.match(name)
        and Path(name).name not in WRITTEN_BY_A_RUN
        and not any((folder / name).exists() for folder in folders)
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_of_a_page_have_targets(page):
    assert broken_links(page) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_a_page_names_exist(page):
    assert missing_files(page) == []


def test_each_page_is_reached_from_the_first():
    """Follow the links from README.md, as a reader does."""
    reached, new = set(), {ROOT / "README.md"}
    while new:
        reached |= new
        links = [(page, link) for page in new for link in LINK.findall(Page(page).prose)]
        targets = {(page.parent / link.partition("#")[0]).resolve() for page, link in links}
        targets |= {target / "README.md" for target in targets}
        new = {path for path in targets if path.suffix == ".md" and path.is_file()} - reached
    assert {page.name for page in find_pages("README.md")} - {
        str(path.relative_to(ROOT)) for path in reached
    } == set()


def test_checks_find_broken_links_and_missing_files(tmp_path):
    """The checks can fail."""
    path = ROOT / "tests" / "absent.md"
    page = type("Text", (), {"path": path, "text": "`pl_fed/gone.py` `metrics.csv` `a b`"})()
    page.prose = "[a](gone.md) [b](../README.md#nowhere) [c](../README.md#limits) [d](https://x.y)"
    assert broken_links(page) == ["gone.md", "../README.md#nowhere"]
    assert missing_files(page) == ["pl_fed/gone.py"]
