"""The files about the project agree on its version."""

import re
from pathlib import Path

import pytest
import yaml

import pl_fed

ROOT = Path(__file__).parents[1]


def test_changelog_and_citation_have_the_version_and_one_date():
    changelog = (ROOT / "CHANGELOG.md").read_text()
    (first, *_) = re.findall(r"^## (\S+) \((\d{4}-\d\d-\d\d)\)$", changelog, re.MULTILINE)
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert first == (pl_fed.__version__, citation["date-released"])
    assert citation["version"] == pl_fed.__version__


def test_citation_has_what_the_format_requires():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    for reference in citation["references"]:
        assert {"type", "title", "authors"} <= reference.keys()


@pytest.mark.slow
def test_changelog_names_existing_classes():
    """A renamed class changes its line, too."""
    text = (ROOT / "CHANGELOG.md").read_text().partition("## 0.1.0")[2].split("### Engines")[0]
    names = set(re.findall(r"`([A-Z]\w+)`", text)) - {"Dataset"}
    sources = "".join(path.read_text() for path in (ROOT / "pl_fed").rglob("*.py"))
    assert len(names) > 60
    assert names - set(re.findall(r"^class (\w+)", sources, re.M)) == set()
