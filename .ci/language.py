"""Language: names are nouns and verbs, and docstrings name things by the words of the field."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE, EXPERIMENTS, TESTS = (ROOT / name for name in ("pl_fed", "experiments", "tests"))

# Names that do not name their value. ``Model.kept`` is an option beside ``trained``.
EMPTY_NAMES = {
    *("alike", "coming", "each", "everyone", "given", "here", "how", "kept", "known", "left"),
    *("mine", "one", "rest", "said", "shown", "some", "someone", "there", "thing", "told"),
    *("what", "which", "who", "whole", "whose"),
}
EXEMPT_NAMES = {("pl_fed/clients/contract.py", "kept")}

# Question words start a clause around a noun. A noun with an adjective is shorter.
QUESTION_WORDS = re.compile(r"\b(what|whatever|which|who|whom|whose)\b", re.IGNORECASE)
LARGEST_SHARE = 2.0  # per 1,000 words of docstrings; at most 4.3 in the packages we compare with

# The first word of a function's name is a verb, or an adjective of a noun: no preposition and no
# participle. Names that the ecosystem has established are exempt (``to``, ``from_pieces``).
PREPOSITIONS = {"at", "before", "between", "by", "in", "into", "of", "over", "under", "with"}
EXEMPT_FUNCTIONS = {"before_instantiate_classes"}  # a hook of LightningCLI
ADJECTIVES = {  # participles that belong to a noun: ``trimmed_mean``, ``training_step``
    *("ascending", "cached", "centred", "enclosing", "frozen", "loading", "mapping", "masked"),
    *("merging", "missing", "mixed", "needed", "padded", "paired", "pulled", "running", "spaced"),
    *("squared", "symmetrized", "tested", "tilted", "training", "trimmed"),
    *("undefined", "unfrozen", "unpadded", "untrained", "validated", "weighted"),
    *("finished", "reading"),
}

# Pictures and circumlocutions: the field has a word for each of them.
OUTDATED_PHRASES = {
    "who lies": "Byzantine client",
    "who has what": "data split",
    "what came": "upload",
    "begins anew": "restarts",
    "the same of": "a docstring that stands alone",
    "likewise": "a docstring that stands alone",
}


@cache
def list_nodes(folder: Path) -> dict[str, list[ast.AST]]:
    """Return the nodes of the syntax trees of a folder's files, by path from the root."""
    return {
        str(path.relative_to(ROOT)): [*ast.walk(ast.parse(path.read_text()))]
        for path in sorted(folder.rglob("*.py"))
    }


def nodes(folder: Path, *kinds: type[ast.AST]) -> Iterator[tuple[str, ast.AST]]:
    """Yield the nodes of some kinds, and their places for a message."""
    for path, tree in list_nodes(folder).items():
        for node in tree:
            if isinstance(node, kinds):
                yield f"{path}:{getattr(node, 'lineno', 1)}", node


def docstrings(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield all docstrings without their examples, and their places."""
    for place, node in nodes(folder, ast.Module, ast.ClassDef, ast.FunctionDef):
        if text := ast.get_docstring(node):
            yield place, re.sub(r"^\s*(>>>|\.\.\.) .*", "", text, flags=re.MULTILINE)


def bound_names(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the names of arguments and variables, and their places."""
    for place, node in nodes(folder, ast.arg, ast.Name):
        if isinstance(node, ast.arg):
            yield place, node.arg
        elif isinstance(node.ctx, ast.Store):
            yield place, node.id


def is_property(function: ast.FunctionDef) -> bool:
    return any("property" in ast.unparse(decorator) for decorator in function.decorator_list)


@pytest.mark.parametrize("folder", [PACKAGE, EXPERIMENTS], ids=lambda folder: folder.name)
def test_names_are_not_empty_words(folder):
    empty = [
        f"{place} {name}"
        for place, name in bound_names(folder)
        if name in EMPTY_NAMES and (place.split(":")[0], name) not in EXEMPT_NAMES
    ]
    assert not empty, "Rename to the noun of the value"


@pytest.mark.parametrize("folder", [PACKAGE, EXPERIMENTS], ids=lambda folder: folder.name)
def test_docstrings_use_few_question_words(folder):
    words, places = 0, []
    for place, text in docstrings(folder):
        words += len(re.findall(r"[A-Za-z']+", text))
        places += [f"{place} {match}" for match in QUESTION_WORDS.findall(text)]
    assert words > 1_000
    share = 1_000 * len(places) / words
    assert share <= LARGEST_SHARE, f"{share:.1f} per 1,000 words: {places}"


@pytest.mark.parametrize("folder", [PACKAGE, EXPERIMENTS], ids=lambda folder: folder.name)
def test_functions_are_named_by_verbs_or_nouns(folder):
    odd = []
    for place, node in nodes(folder, ast.FunctionDef):
        first = node.name.strip("_").split("_")[0]
        participle = re.search(r"[^e]ed$|[a-z]ing$", first) and first not in ADJECTIVES
        odd_name = (first in PREPOSITIONS or participle) and node.name not in EXEMPT_FUNCTIONS
        if odd_name and not is_property(node):
            odd.append(f"{place} {node.name}")
    assert not odd, "Name a function by its verb, or by the noun that it returns"


@pytest.mark.parametrize("folder", [PACKAGE, EXPERIMENTS], ids=lambda folder: folder.name)
def test_no_tuple_is_packed_for_splatting(folder):
    """Keyword arguments, or a record with names, say which value is which."""
    splatted = []
    for place, function in nodes(folder, ast.FunctionDef):
        packed = {
            target.id
            for node in ast.walk(function)
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        splatted += [
            f"{place} *{argument.value.id}"
            for node in ast.walk(function)
            if isinstance(node, ast.Call)
            for argument in node.args
            if isinstance(argument, ast.Starred)
            and isinstance(argument.value, ast.Name)
            and argument.value.id in packed
        ]
    assert not splatted


@pytest.mark.parametrize("folder", [PACKAGE, EXPERIMENTS], ids=lambda folder: folder.name)
def test_docstrings_use_the_words_of_the_field(folder):
    texts = [*docstrings(folder)]
    outdated = [
        f"{place}: {phrase!r}, better: {better}"
        for place, text in texts
        for phrase, better in OUTDATED_PHRASES.items()
        if phrase in " ".join(text.lower().split())
    ]
    assert not outdated


def test_public_functions_and_classes_are_documented():
    """Methods that override a documented one need no docstring of their own."""
    undocumented = []
    for place, owner in nodes(PACKAGE, ast.Module, ast.ClassDef):
        overrides = isinstance(owner, ast.ClassDef) and owner.bases
        kinds = ast.ClassDef if overrides else (ast.FunctionDef, ast.ClassDef)
        for node in owner.body:
            public = isinstance(node, kinds) and not node.name.startswith("_")
            if public and not ast.get_docstring(node):
                undocumented.append(f"{place.split(':')[0]}:{node.lineno} {node.name}")
    assert not undocumented
