"""Architecture: imports go downwards, leaves do not import Lightning, one file uses its internals.

A new room or file fails here until it gets a floor.
"""

import ast
import importlib.util
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import pl_fed

HOUSE = Path(pl_fed.__file__).parent

FLOORS = {
    8: ("__init__", "__main__"),
    7: ("studies",),
    6: ("command",),
    5: ("lightning",),
    4: ("federation", "callbacks", "loggers", "reports", "exports", "run_folder"),
    3.5: ("rounds",),
    3: ("evaluation", "distributed"),
    2.5: ("preflight",),
    2: ("clients", "engine"),
    1.5: ("data",),
    1: (
        "aggregators",
        "attacks",
        "compressors",
        "metrics",
        "models",
        "optimizers",
        "partitioners",
        "privacy",
        "samplers",
        "skews",
        "systems",
        "tasks",
    ),
    0.7: ("statistics",),
    0.6: ("functional",),
    0.3: ("nets",),
    0.4: ("types",),
    0.1: ("lazy_imports",),
    0: (
        *("arguments", "configurable", "files", "isolation", "plain_yaml", "random", "state"),
        *("text", "torch_internals", "trees", "version"),
    ),
    -0.1: ("devices", "safe_load"),
}
FLOOR = {room: floor for floor, rooms in FLOORS.items() for room in rooms}

SAME_FLOOR = {  # imports allowed between rooms of one floor, without cycles
    "engine": {"clients"},
    "callbacks": {"federation", "loggers", "reports", "run_folder"},
    "exports": {"federation", "run_folder"},
}

PUBLIC_THOUGH_PRIVATE = {
    "command.checkpoint_cli": {"_get"},
    "command.fit": {"_get"},
}  # LightningCLI offers no other way to a section's object


def files():
    return sorted(HOUSE.rglob("*.py"))


def name_of(path):
    """``pl_fed/data/npz.py`` is ``data.npz``; a room's ``__init__`` is the room."""
    parts = path.relative_to(HOUSE).with_suffix("").parts
    return ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)


ROOMS_OF_TEXT_FILES = ("callbacks", "data", "exports", "loggers", "reports", "studies")


def violations(paths, find):
    """Return the problems that ``find`` yields, by file, without files that have none."""
    problems_by_file = {name_of(path): list(find(path)) for path in paths}
    return {name: problems for name, problems in problems_by_file.items() if problems}


def open_calls_without_encoding(path):
    """Yield the lines of a file that open a text file in the encoding of the locale."""
    opens = {"open", "read_text", "write_text"}
    for node in ast.walk(tree(path)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        owner = getattr(node.func.value, "id", "")
        modes = [argument.value for argument in node.args[:1] if isinstance(argument, ast.Constant)]
        binary = node.func.attr == "open" and "b" in str(modes)
        named = any(keyword.arg == "encoding" for keyword in node.keywords)
        if node.func.attr in opens and not (binary or named or owner in ("Image", "os", "self")):
            yield node.lineno


@pytest.mark.slow
def test_text_files_are_opened_with_an_encoding():
    written = [path for path in files() if room_of(path) in ROOMS_OF_TEXT_FILES]
    assert violations(written, open_calls_without_encoding) == {}


def room_of(path):
    return name_of(path).split(".")[0]


@cache
def tree(path):
    return ast.parse(path.read_text(), filename=str(path))


@cache
def imports(path):
    """Return the full names of all imports of a file."""
    names = []
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: say where `{node.module}` is, from pl_fed on"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def imported_rooms(path):
    """Yield the other rooms that a file imports from."""
    for name in imports(path):
        parts = name.split(".")
        if parts[0] == "pl_fed":
            room = parts[1] if len(parts) > 1 else "__init__"
            yield room if room in FLOOR else "__init__"


def test_every_room_has_a_floor():
    rooms = {room_of(path) for path in files()}
    assert rooms - set(FLOOR) == set(), "give new rooms and files a floor"
    assert set(FLOOR) - rooms == set(), "forget rooms that are gone"


def upward_imports(path):
    """Yield the rooms that a file imports from though they do not lie below its own room."""
    room = room_of(path)
    allowed = SAME_FLOOR.get(room, set()) | {room}
    for imported in imported_rooms(path):
        if imported not in allowed and not FLOOR[imported] < FLOOR[room]:
            yield imported


@pytest.mark.slow
def test_imports_go_downwards():
    assert violations(files(), upward_imports) == {}


def test_rooms_of_one_floor_form_no_cycle():
    remaining = {room: set(imported) for room, imported in SAME_FLOOR.items()}
    while remaining:
        free = {room for room, imported in remaining.items() if not imported & set(remaining)}
        assert free, f"these import each other: {sorted(remaining)}"
        remaining = {room: imported for room, imported in remaining.items() if room not in free}
    for room, imported in SAME_FLOOR.items():
        assert {FLOOR[other] for other in imported} == {FLOOR[room]}
        assert FLOOR[room] > 1, "leaves never import each other"


@pytest.mark.slow
def test_no_two_rooms_import_each_other():
    pairs = {(room_of(path), room) for path in files() for room in imported_rooms(path)}
    assert not {(a, b) for a, b in pairs if a < b and (b, a) in pairs}


LEAVES = [
    path
    for path in files()
    if FLOOR.get(room_of(path), 9) <= 1
    or (room_of(path) == "reports" and name_of(path) != "reports.split")  # reads files only
]


LIGHTNING = {"lightning", "pytorch_lightning", "lightning_fabric"}


def lightning_imports(path):
    """Yield the packages of Lightning that a file imports."""
    yield from {name.split(".")[0] for name in imports(path)} & LIGHTNING


def test_leaves_do_not_import_lightning():
    assert violations(LEAVES, lightning_imports) == {}


WITHOUT_LIGHTNING = """
import importlib, sys, types
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("lightning", "pytorch_lightning", "lightning_fabric"):
            raise ImportError(f"{name} is blocked")
sys.meta_path.insert(0, Block())
house = types.ModuleType("pl_fed")  # without its __init__, which is the top of the house
house.__path__ = [sys.argv[1]]
sys.modules["pl_fed"] = house
for name in sys.argv[2:]:
    importlib.import_module(f"pl_fed.{name}")
assert "lightning" not in sys.modules
print(len(sys.argv) - 2)
"""


@pytest.mark.exhaustive  # the tests of imports above ask the same of the text of all files
@pytest.mark.slow
def test_leaves_import_without_lightning():
    names = [name_of(path) for path in LEAVES]
    command = [sys.executable, "-c", WITHOUT_LIGHTNING, str(HOUSE), *names]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr[-2000:]
    assert process.stdout.strip() == str(len(names))


INTERNAL_MODULES = ("lightning.pytorch.loops", "lightning.pytorch.trainer.")
OUTSIDE_THE_LOOP = [path for path in files() if name_of(path) != "lightning.loop"]


@cache
def private_names():
    """Return the private names in Lightning's trainer, loops, modules and command line."""
    lightning = Path(importlib.util.find_spec("lightning.pytorch").origin).parent
    sources = [
        *lightning.glob("trainer/**/*.py"),
        *lightning.glob("loops/**/*.py"),
        *lightning.glob("core/*.py"),
        lightning / "callbacks" / "callback.py",
        lightning / "cli.py",
    ]
    return set().union(*(private_definitions(ast.parse(path.read_text())) for path in sources))


def private_definitions(source):
    """Return the names with one leading underscore that a source defines."""
    names = set()
    for node in ast.walk(source):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
    return {name for name in names if name.startswith("_") and not name.startswith("__")}


def test_private_names_of_lightning_are_collected():
    expected = {"_FitLoop", "_should_check_val_epoch", "_batches_that_stepped", "_get"}
    assert expected <= private_names()


def lightning_internals(path):
    """Yield the internal modules and private names of Lightning that a file names."""
    for name in imports(path):
        parts = name.split(".")
        private = any(part.startswith("_") for part in parts)
        if parts[0] == "lightning" and (name.startswith(INTERNAL_MODULES) or private):
            yield name
    own = private_definitions(tree(path)) | PUBLIC_THOUGH_PRIVATE.get(name_of(path), set())
    used = {node.attr for node in ast.walk(tree(path)) if isinstance(node, ast.Attribute)}
    yield from (used & private_names()) - own


@pytest.mark.slow
def test_only_the_loop_names_internals_of_lightning():
    assert violations(OUTSIDE_THE_LOOP, lightning_internals) == {}


def test_loop_names_internals_of_lightning():
    loop = HOUSE / "lightning" / "loop.py"
    used = {node.attr for node in ast.walk(tree(loop)) if isinstance(node, ast.Attribute)}
    assert "_should_check_val_epoch" in used, "or this test looks for the wrong thing"
    assert any(name.startswith(INTERNAL_MODULES) for name in imports(loop))


@pytest.mark.slow
def test_package_lists_its_names_without_importing_torch():
    code = "import sys, pl_fed; print(*dir(pl_fed)); print('torch' in sys.modules)"
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    names, imported = process.stdout.splitlines()
    rooms = {"clients", "data", "models", "samplers", "partitioners", "aggregators", "attacks"}
    assert {"Federation", "Trainer", "__version__", *rooms} <= set(names.split())
    assert imported == "False"
    assert all(getattr(pl_fed, name) is not None for name in names.split())
    assert pl_fed.data.Digits.__name__ == "Digits"
    with pytest.raises(AttributeError, match="no attribute 'digits'"):
        _ = pl_fed.digits


OUTSIDE_TORCH_INTERNALS = [path for path in files() if name_of(path) != "torch_internals"]


def torch_internals(source):
    """Yield the names with an underscore, or of an experiment, that a source takes from torch."""
    for node in ast.walk(source):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        else:
            names = []
        for name in names:
            first, *parts = name.split(".")
            dotted = all(part.isidentifier() for part in parts)
            if first in ("torch", "torchvision", "nn") and dotted and any(map(is_internal, parts)):
                yield name


def is_internal(part):
    private = part.startswith("_") and not part.startswith("__")
    return private or part in ("experimental", "_pytree")


@pytest.mark.slow
def test_only_torch_internals_names_internals_of_torch():
    names = violations(OUTSIDE_TORCH_INTERNALS, lambda path: torch_internals(tree(path)))
    assert names == {}


def test_torch_internals_names_internals_of_torch():
    internals = set(torch_internals(tree(HOUSE / "torch_internals.py")))
    expected = {"torch._inductor.compile", "torch._C._current_graph_task_id"}
    assert expected <= internals, "or this test looks for the wrong thing"


def test_torch_internals_imports_lazily():
    body = tree(HOUSE / "torch_internals.py").body
    statements = [node for node in body if isinstance(node, ast.Import | ast.ImportFrom)]
    assert not list(torch_internals(ast.Module(statements, [])))


def assert_lines(path):
    """Yield the lines of a file that assert."""
    yield from (node.lineno for node in ast.walk(tree(path)) if isinstance(node, ast.Assert))


@pytest.mark.slow
def test_package_has_no_assert():
    assert violations(files(), assert_lines) == {}


def undocumented_names(node, prefix=""):
    """Yield the public classes and functions without a docstring in a module or class.

    The setter of a property has its getter's.
    """
    for child in node.body:
        if not isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        decorators = {ast.unparse(decorator) for decorator in child.decorator_list}
        if child.name.startswith("_") or decorators & {"overload", f"{child.name}.setter"}:
            continue
        if ast.get_docstring(child) is None:
            yield f"{prefix}{child.name}"
        if isinstance(child, ast.ClassDef):
            yield from undocumented_names(child, f"{child.name}.")


def undocumented_names_of_file(path):
    """Yield the names without a docstring in a file, the module first."""
    if ast.get_docstring(tree(path)) is None:
        yield "the module"
    yield from undocumented_names(tree(path))


def test_public_names_are_documented():
    assert violations(files(), undocumented_names_of_file) == {}
