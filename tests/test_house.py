"""The house: which room may know which, checked against the tree.

The map below is the plan of `docs/design.md` as data. A new room, flag or environment variable changes this file in the
same commit. Every rule is tried on a planted violation too.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent

# From the ground up. Rooms of one floor never meet; the package's own __init__ is the roof.
FLOORS: tuple[tuple[str, ...], ...] = (
    ("base",),
    ("spec",),
    ("cache",),
    ("kernels",),
    ("model", "text", "layer"),
    ("engine", "plan"),
    ("compose",),
    ("learn", "measure", "verify"),
    ("cli",),
)
ROOF = "kvist"

# What comes from outside, and where it may not go (prefixes of modules).
NO_TORCH = ("kvist.base", "kvist.spec", "kvist.plan", "kvist.cache", "kvist.cli.main")
TORCH_ANYWAY = ("kvist.cache.pool",)
TRANSFORMERS_ONLY_IN = ("kvist.text", "kvist.hf")
NATIVE_ONLY_IN = ("kvist.kernels",)

MAX_LINES = 400
VAGUE_NAMES = {"util", "utils", "common", "helper", "helpers", "misc"}
# Written in pieces, so that this file passes its own rule.
MACHINE_PATHS = re.compile(
    "|".join([r"\.\./" + "shared", "/wo" + "rk/", "/ro" + "ot/", "/ho" + "me/", "/tmp/" + r"\w"])
)

ENVIRONMENT = {"KVIST_KERNELS", "OLLAMA_MODELS", "XDG_CACHE_HOME"}
FLAGS: dict[str, set[str]] = {
    "run": {
        *("--max-tokens", "-n", "--ctx-size", "--temperature", "--top-k", "--top-p", "--min-p", "--seed", "--stop"),
        *("--threads", "--weights", "--dtype", "--kv-cache-dtype", "--block-size", "--system", "--prompt-file"),
        *("--no-chat-template", "--no-cache", "--kv-window", "--kv-sinks", "--mla-prefill", "--json"),
    },
    "plan": {
        *("--ctx-size", "--max-model-len", "--max-num-seqs", "--kv-cache-dtype", "--cache-type-k", "--cache-type-v"),
        *("--memory", "--kv-cache-memory", "--device", "--tensor-parallel", "--engine", "--weights-dtype"),
        *("--block-size", "--source-tokens", "--lengths", "--calibrate", "--assume-standard", "--explain", "--plot"),
        "--json",
    },
    "learn": {"--all", "--device", "--head-dim", "--json", "--model", "--plot", "--source"},
    "bench": {"--json", "--plot", "--quick", "--weights"},
    "verify": {"--quick", "--full", "--weights", "--dtype", "--json"},
    "info": {"--json"},
}


def modules(root: Path) -> Iterator[tuple[str, Path]]:
    """(dotted name, file) of every module below src/."""
    source = root / "src"
    for path in sorted((source / "kvist").rglob("*.py")):
        parts = path.relative_to(source).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def room_of(module: str) -> str:
    parts = module.split(".")
    if module == "kvist._native" or module.startswith("kvist._native."):
        return "kernels"
    if module == "kvist.__main__":  # `python -m kvist` has to find it beside the package's own __init__
        return ROOF
    return parts[1] if len(parts) > 1 else ROOF


def below(module: str, prefixes: tuple[str, ...]) -> bool:
    return any(module == prefix or module.startswith(prefix + ".") for prefix in prefixes)


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imports(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, target) of every absolute import: in functions, under TYPE_CHECKING and through import_module too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            if node.module == "kvist":
                for alias in node.names:
                    yield node.lineno, f"kvist.{alias.name}"
            else:
                yield node.lineno, str(node.module)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in {"import_module", "__import__"} and isinstance(node.args[0].value, str):
                yield node.lineno, node.args[0].value


def check_rooms(root: Path) -> list[str]:
    """The map and the tree name the same rooms."""
    planned = {room for floor in FLOORS for room in floor}
    built = {room_of(name) for name, _ in modules(root)} - {ROOF}
    return [f"{room}: in the tree, not on the map" for room in sorted(built - planned)] + [
        f"{room}: on the map, not in the tree" for room in sorted(planned - built)
    ]


def check_floors(root: Path) -> list[str]:
    """A module imports its own room and lower floors, nothing else of ours."""
    level = {room: index for index, floor in enumerate(FLOORS) for room in floor}
    found = []
    for module, path in modules(root):
        room = room_of(module)
        if room == ROOF or room not in level:
            continue
        for line, target in imports(parse(path)):
            if target != "kvist" and not target.startswith("kvist."):
                continue
            other = room_of(target)
            if other != room and level.get(other, len(FLOORS)) >= level[room]:
                found.append(f"{path.relative_to(root)}:{line}: {room} imports {target}")
    return found


def check_relative(root: Path) -> list[str]:
    """No relative imports."""
    return [
        f"{path.relative_to(root)}:{node.lineno}: relative import"
        for _, path in modules(root)
        for node in ast.walk(parse(path))
        if isinstance(node, ast.ImportFrom) and node.level
    ]


def check_foreign(root: Path) -> list[str]:
    """torch and transformers stay out of the rooms that must be quick, the native module inside kernels."""
    found = []
    for module, path in modules(root):
        for line, target in imports(parse(path)):
            top = target.split(".")[0]
            wrong = (
                (top == "torch" and below(module, NO_TORCH) and not below(module, TORCH_ANYWAY))
                or (top == "transformers" and not below(module, TRANSFORMERS_ONLY_IN))
                or (target.startswith("kvist._native") and not below(module, NATIVE_ONLY_IN))
            )
            if wrong:
                found.append(f"{path.relative_to(root)}:{line}: {module} imports {target}")
    return found


def check_names(root: Path) -> list[str]:
    """No module is called after nothing."""
    files = [path for folder in ("src", "csrc") for path in sorted((root / folder).rglob("*")) if path.is_file()]
    return [
        f"{path.relative_to(root)}: says nothing about what it holds"
        for path in files
        if VAGUE_NAMES & {part.lower() for part in (*path.relative_to(root).parts[:-1], path.stem)}
    ]


def check_lengths(root: Path) -> list[str]:
    """A file stays under the limit."""
    found = []
    for folder in ("src", "csrc"):
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in {".py", ".pyi", ".cpp", ".hpp", ".h", ".inc"}:
                lines = len(path.read_text(encoding="utf-8").splitlines())
                if lines >= MAX_LINES:
                    found.append(f"{path.relative_to(root)}: {lines} lines, the limit is {MAX_LINES - 1}")
    return found


def check_paths(root: Path) -> list[str]:
    """Nothing names a place of one machine."""
    found = []
    for folder in ("src", "csrc", "tests", "tools", "bench", "docs", "examples", ".ci", "requirements"):
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in {".py", ".pyi", ".cpp", ".hpp", ".h", ".md", ".txt", ".json", ".sh", ".toml"} or (
                path.is_file() and folder == ".ci"
            ):
                for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
                    if MACHINE_PATHS.search(line):
                        found.append(f"{path.relative_to(root)}:{number}: names a place of one machine")
    for name in ("README.md", "CHANGELOG.md", "Makefile", "CMakeLists.txt", "pyproject.toml"):
        path = root / name
        if path.exists() and MACHINE_PATHS.search(path.read_text(encoding="utf-8")):
            found.append(f"{name}: names a place of one machine")
    return found


def environment_reads(root: Path) -> set[str]:
    """Names of the environment variables that the package reads; ``file:line`` for a read whose name cannot be told."""
    names = set()
    trees = {path: parse(path) for _, path in modules(root)}
    constants = {  # of the whole package, since a name may be imported from where it is kept
        target.id: node.value
        for tree in trees.values()
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for path, tree in trees.items():
        named: dict[int, ast.expr] = {}  # id of the environ expression -> the name looked up in it
        for node in ast.walk(tree):
            if isinstance(node, ast.Subscript):
                named[id(node.value)] = node.slice
            elif isinstance(node, ast.Call) and node.args:
                whole = node.func.value if isinstance(node.func, ast.Attribute) else node.func
                named[id(node.func)] = named[id(whole)] = node.args[0]
            elif isinstance(node, ast.Compare):
                named[id(node.comparators[0])] = node.left
        for node in ast.walk(tree):
            name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
            if name in {"environ", "getenv"}:
                key = named.get(id(node))
                key = constants.get(key.id, key) if isinstance(key, ast.Name) else key
                known = isinstance(key, ast.Constant)
                names.add(str(key.value) if known else f"{path.relative_to(root)}:{node.lineno}")
    for path in sorted((root / "csrc").rglob("*")):
        if path.is_file():
            names |= set(re.findall(r'getenv\("(\w+)"\)', path.read_text(encoding="utf-8")))
    return names


def check_docstrings(package: ModuleType) -> list[str]:
    """Every public name exists and says what it is."""
    found = []
    for name in package.__all__:
        value = getattr(package, name)
        if (inspect.isclass(value) or inspect.isroutine(value)) and not inspect.getdoc(value):
            found.append(f"{package.__name__}.{name}: no docstring")
        own = vars(value).items() if inspect.isclass(value) else ()
        found += [
            f"{package.__name__}.{name}.{method}: no docstring"
            for method, function in own
            if inspect.isfunction(function) and not method.startswith("_") and not inspect.getdoc(function)
        ]
    return found


CHECKS: tuple[Callable[[Path], list[str]], ...] = (
    check_rooms,
    check_floors,
    check_relative,
    check_foreign,
    check_names,
    check_lengths,
    check_paths,
)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_house(check: Callable[[Path], list[str]]) -> None:
    assert check(ROOT) == []


def test_public_names_are_documented() -> None:
    package = importlib.import_module("kvist")
    assert package.__all__
    assert check_docstrings(package) == []


def test_environment_variables_are_listed() -> None:
    assert environment_reads(ROOT) == ENVIRONMENT


def command_flags() -> dict[str, frozenset[str]]:
    from typer.main import get_command

    root = get_command(importlib.import_module("kvist.cli.main").app)
    commands = getattr(root, "commands", {"": root})
    return {
        name: frozenset(flag for param in command.params for flag in param.opts if flag.startswith("-")) - {"--help"}
        for name, command in commands.items()
    }


def test_flags_are_listed() -> None:
    assert command_flags() == FLAGS


# The same rules on planted violations: (check, file, content, words of the complaint).
LONG = "x = 1\n" * MAX_LINES
PLANTED = [
    (check_rooms, "src/kvist/attic/box.py", "", "attic: in the tree, not on the map"),
    (check_rooms, None, "", "cli: on the map, not in the tree"),
    (
        check_floors,
        "src/kvist/cache/pool.py",
        "from kvist.kernels.ops import Step\n",
        "cache imports kvist.kernels.ops",
    ),
    (check_floors, "src/kvist/cache/pool.py", "def f():\n    import kvist.engine\n", "cache imports kvist.engine"),
    (
        check_floors,
        "src/kvist/spec/a.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from kvist.cache.pool import Pool\n",
        "spec imports kvist.cache.pool",
    ),
    (check_floors, "src/kvist/model/a.py", "from kvist.text import stream\n", "model imports kvist.text"),
    (check_floors, "src/kvist/text/a.py", "from kvist import layer\n", "text imports kvist.layer"),
    (check_floors, "src/kvist/engine/a.py", "import kvist\n", "engine imports kvist"),
    (check_floors, "src/kvist/base/a.py", "import kvist._native\n", "base imports kvist._native"),
    (
        check_floors,
        "src/kvist/base/a.py",
        "import importlib\nimportlib.import_module('kvist.cli')\n",
        "base imports kvist.cli",
    ),
    (check_relative, "src/kvist/cache/pool.py", "from . import blocks\n", "pool.py:1: relative import"),
    (
        check_relative,
        "src/kvist/cache/pool.py",
        "def f():\n    from ..base import errors\n",
        "pool.py:2: relative import",
    ),
    (check_foreign, "src/kvist/base/a.py", "import torch\n", "kvist.base.a imports torch"),
    (check_foreign, "src/kvist/spec/a.py", "def f():\n    from torch import nn\n", "kvist.spec.a imports torch"),
    (check_foreign, "src/kvist/cache/blocks.py", "import torch\n", "kvist.cache.blocks imports torch"),
    (check_foreign, "src/kvist/engine/a.py", "from transformers import AutoModel\n", "imports transformers"),
    (check_foreign, "src/kvist/engine/a.py", "from kvist import _native\n", "kvist.engine.a imports kvist._native"),
    (check_names, "src/kvist/cache/utils.py", "", "utils.py: says nothing"),
    (check_names, "src/kvist/helpers/a.py", "", "helpers"),
    (check_names, "csrc/common.hpp", "", "common.hpp: says nothing"),
    (check_lengths, "src/kvist/cache/pool.py", LONG, "pool.py: 400 lines, the limit is 399"),
    (check_lengths, "csrc/kernels.cpp", LONG, "kernels.cpp: 400 lines"),
    (check_paths, "tests/test_a.py", "open('../" + "shared/a.json')\n", "test_a.py:1: names a place"),
    (check_paths, "docs/a.md", "see\n/ho" + "me/me/x\n", "a.md:2: names a place"),
    (check_paths, "README.md", "/wo" + "rk/x\n", "README.md: names a place"),
]


@pytest.mark.parametrize(("check", "file", "content", "words"), PLANTED)
def test_planted_violation_is_caught(
    tmp_path: Path, check: Callable[[Path], list[str]], file: str | None, content: str, words: str
) -> None:
    if file is not None:
        path = tmp_path / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
    complaints = check(tmp_path)
    assert any(words in complaint for complaint in complaints), complaints


def test_what_is_allowed_is_not_caught(tmp_path: Path) -> None:
    allowed = {
        "src/kvist/__init__.py": "from kvist.cli.main import main\n",
        "src/kvist/__main__.py": "from kvist.cli.main import main\n",
        "src/kvist/cache/pool.py": "import torch\nfrom kvist.cache import blocks\nfrom kvist.base import errors\n",
        "src/kvist/cache/blocks.py": "x = 1\n" * (MAX_LINES - 1),
        "src/kvist/kernels/native.py": "def f():\n    import kvist._native\n",
        "src/kvist/text/tokenizer.py": "def f():\n    import transformers\n",
    }
    for file, content in allowed.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(content, encoding="utf-8")
    for check in CHECKS:
        if check is not check_rooms:
            assert check(tmp_path) == []


def test_planted_environment_reads_are_seen(tmp_path: Path) -> None:
    (tmp_path / "src/kvist/cli").mkdir(parents=True)
    (tmp_path / "csrc").mkdir()
    lines = (
        "import os",
        "E = 'KVIST_E'",
        "a = os.environ.get('KVIST_A')",
        "b = os.environ['KVIST_B']",
        "c = os.getenv('KVIST_C')",
        "e = os.environ.get(E) if 'KVIST_F' in os.environ else None",
        "g = dict(os.environ)",
    )
    (tmp_path / "src/kvist/cli/a.py").write_text("\n".join(lines))
    (tmp_path / "csrc/a.cpp").write_text('auto d = std::getenv("KVIST_D");\n')
    expected = {f"KVIST_{letter}" for letter in "ABCDEF"} | {"src/kvist/cli/a.py:7"}
    assert environment_reads(tmp_path) == expected


def test_planted_missing_docstring_is_caught() -> None:
    class Bare:
        def method(self) -> None: ...

    package = ModuleType("planted")
    package.__dict__.update(__all__=["Bare"], Bare=Bare)
    assert check_docstrings(package) == ["planted.Bare: no docstring", "planted.Bare.method: no docstring"]
