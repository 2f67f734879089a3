"""Shakespeare by speaking role: the text of the plays, for models of the next character."""

from collections.abc import Iterator

import torch

from pl_fed.arguments import check_integers
from pl_fed.data.folders import data_root, missing_files_error
from pl_fed.data.reading import report_read_errors
from pl_fed.data.source import Arrays, DataSource


class Shakespeare(DataSource):
    """Shakespeare by speaking role: sequences of characters, and the next character of each.

    The owner of a sequence is its role, as in LEAF (S. Caldas et al., arXiv 1812.01097). All
    speeches of a role are joined in the order of the plays and cut into sequences of ``length``
    characters, without overlap. Ids of characters are their positions in the sorted alphabet of the
    file, so the vocabulary has as many ids as the file has characters (65 for the usual file).

    Departure from LEAF: its samples are 80 characters and the one that follows, at every position
    of the text. Here each position of a sequence has a target.

    Args:
        root: The folder that holds ``Shakespeare/input.txt``: speeches that end with an empty line,
            each after a line with its role and a colon. ``None`` uses the environment variable
            ``PL_FED_DATA``, or ``data``.
        length: Characters in a sequence, at least 1.
        min_characters: Smallest number of characters of a role; other roles are left out.
        characters: The vocabulary, in the order of ids; all other characters share one more id.
            ``None`` takes those of the file, which ``federation.privacy`` refuses.

    Raises:
        ValueError: If an argument is below 1.
    """

    file = "Shakespeare/input.txt"

    def __init__(
        self,
        root: str | None = None,
        length: int = 80,
        min_characters: int = 1000,
        characters: str | None = None,
    ) -> None:
        check_integers(1, length=length, min_characters=min_characters)
        self.root = root
        self.length = length
        self.min_characters = min_characters
        self.characters = characters

    def list_shared_quantities(self) -> dict[str, str]:
        """Return that the characters of all roles have numbers, unless they are given."""
        return {} if self.characters is not None else {"characters": "null, which reads the plays"}

    def load(self) -> Arrays:
        """Return ids of characters and of the next characters, int64 [samples, length] each.

        Raises:
            FileNotFoundError: If the file is missing.
            ValueError: If the file has no role with enough characters.
        """
        path = data_root(self.root) / self.file
        if not path.is_file():
            remedy = "put the text of the plays there, speeches below lines with their roles"
            raise missing_files_error(data_root(self.root), self.file, remedy)
        kind = f"speeches below their roles, of {self.min_characters} characters a role"
        with report_read_errors(path, kind):
            text = path.read_text(encoding="utf-8-sig")
            roles = self._roles(text)
            if not roles:
                raise ValueError(
                    f"Expected {path} to be {kind} but got no such role: lower"
                    " `data.dataset.min_characters`."
                )
        vocabulary = sorted({*text}) if self.characters is None else [*self.characters]
        ids = {character: position for position, character in enumerate(vocabulary)}
        inputs, targets, owners = [], [], []
        for owner, speeches in enumerate(roles.values()):
            characters = torch.tensor([ids.get(letter, len(ids)) for letter in speeches])
            samples = (len(characters) - 1) // self.length
            used = samples * self.length
            inputs.append(characters[:used].view(samples, self.length))
            targets.append(characters[1 : used + 1].view(samples, self.length))
            owners.append(torch.full((samples,), owner))
        return Arrays(
            torch.cat(inputs), torch.cat(targets), client=torch.cat(owners), names=[*roles]
        )

    def _roles(self, text: str) -> dict[str, str]:
        """Return the joined speeches of each role with enough characters, sorted by role."""
        speeches: dict[str, list[str]] = {}
        for role, speech in _speeches(text):
            speeches.setdefault(role, []).append(speech)
        joined = {role: "\n".join(parts) for role, parts in sorted(speeches.items())}
        smallest = max(self.min_characters, self.length + 1)
        return {role: text for role, text in joined.items() if len(text) >= smallest}


def _speeches(text: str) -> Iterator[tuple[str, str]]:
    r"""Yield roles and their speeches.

    Example:
        >>> list(_speeches("All:\nSpeak,\nspeak.\n\nFirst Citizen:\nNo more.\n"))
        [('All', 'Speak,\nspeak.'), ('First Citizen', 'No more.')]
    """
    for paragraph in text.strip().split("\n\n"):
        first, _, speech = paragraph.strip().partition("\n")
        if first.endswith(":") and speech:
            yield first.removesuffix(":"), speech
