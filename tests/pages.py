"""The pages of the documentation, their code blocks, links and headings."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)
FOLDERS = ("configs", "pl_fed", "experiments")  # the folders with pages, beside the top one
NOT_PAGES = {"head.md", "notes.md"}  # parts of a page, which a script joins with its tables


@dataclass(frozen=True)
class Page:
    """Page: a Markdown file of the documentation.

    Attributes:
        path: The file.
    """

    path: Path

    @property
    def name(self) -> str:
        """The path within the repository."""
        return str(self.path.relative_to(ROOT))

    @property
    def text(self) -> str:
        """The whole text."""
        return self.path.read_text()

    @property
    def prose(self) -> str:
        """The text without code blocks and code in lines."""
        return re.sub(r"`[^`\n]+`", "", FENCE.sub("", self.text))

    def blocks(self, *languages: str) -> list[tuple[str, str]]:
        """Return pairs of language and code, in their order; all blocks without languages."""
        blocks = FENCE.findall(self.text)
        return [block for block in blocks if not languages or block[0] in languages]

    @property
    def commands(self) -> list[list[str]]:
        """The commands of the shell blocks, as words without comments."""
        code = "".join(code for _, code in self.blocks("bash"))
        return split_commands(code)


def split_commands(code: str) -> list[list[str]]:
    """Return the commands of a shell block, without variables before them and in full."""
    lines = code.replace("\\\n", " ").splitlines()
    commands = [shlex.split(line, comments=True) for line in lines]
    without_variables = [
        [word for place, word in enumerate(words) if place or not re.match(r"[A-Z_]+=", word)]
        for words in commands
    ]
    full_names = [
        ["python", "-m", *words] if words[:1] == ["pl_fed"] else words
        for words in without_variables
    ]
    return [words for words in full_names if words]


def find_pages(name: str = "*.md") -> list[Page]:
    """Return the pages with a name, the one of the repository's top first."""
    files = [*sorted(ROOT.glob(name))]
    files += [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob(name))]
    return [Page(path) for path in files if path.name not in NOT_PAGES]
