"""Imports go downwards only, and files and functions stay small."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

import relax_fusion

ROOT = Path(relax_fusion.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
FLOORS = (
    ("hardware", "workload", "tiling", "errors", "validation", "files", "estimator", "report"),
    (
        *("matching", "canonical", "compute", "equivalence", "transforms", "launch"),
        *("quantization", "cuda_kernels", "inventory", "mend", "tvm_ir", "algebra", "grouping"),
        "parallel",
    ),
    ("passes", "dlight_rules", "triton_bridge"),
    (
        *("registration", "pipeline", "phases", "options", "entry"),
        *("models", "frontends", "mlc", "tuning", "timing"),
    ),
    ("cli", "torch"),
    ("studio",),
)
FLOOR_OF = {name: floor for floor, names in enumerate(FLOORS) for name in names}
SIBLINGS = FLOORS[2]
HEAVY = {"tvm", "tvm_ffi", "triton", "numpy", "torch"}
ESTIMATOR = ROOT / "estimator"
USES = {
    ESTIMATOR / "fitting.py": {"numpy"},
    ESTIMATOR / "prediction.py": {"numpy"},
    ESTIMATOR / "search.py": {"numpy"},
    ESTIMATOR / "gpu_cost.py": {"numpy"},
    ESTIMATOR / "families" / "matmuls.py": {"numpy"},
    ROOT / "workload" / "reference.py": {"numpy"},
    ROOT / "workload" / "unpacked.py": {"numpy"},
    ROOT / "hardware" / "detect.py": {"tvm"},
    ROOT / "hardware" / "target.py": {"tvm"},
}
"""What single modules of floor 0 are there for."""

# Signatures and docstrings are free.  A Triton kernel takes flat what Python takes in objects, and
# its calls are as long.
MAX_LINES, MAX_FUNCTION_LINES, MAX_KERNEL_LINES, MAX_PARAMETERS = 350, 50, 60, 7


def unit(path: Path) -> str:
    """Return the part of the package that a file belongs to."""
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


@cache
def parsed(text: str) -> ast.Module:
    """Return the tree of a file, which several tests walk."""
    return ast.parse(text)


@pytest.fixture(scope="module", autouse=True)
def forget_trees() -> Iterator[None]:
    """Give the trees back, which are many objects."""
    yield
    parsed.cache_clear()


@cache
def files_below(root: Path) -> frozenset[Path]:
    """Return the files of a folder."""
    return frozenset(root.rglob("*.py"))


def imported(path: Path) -> list[tuple[int, str]]:
    """Return line and full name of every module that a file imports, wherever it does."""
    package = ["relax_fusion", *path.relative_to(ROOT).parent.parts]
    found = []
    for node in ast.walk(parsed(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *(node.module or "").split(".")]).strip(".")
            names = [a.name for a in node.names] if module == "relax_fusion" else [""]
            found += [(node.lineno, f"{module}.{n}".strip(".")) for n in names]
    return found


def imported_at_once(path: Path) -> set[Path]:
    """Return the files of the package that the import of a file imports, one step far.

    What stands in a function, or is for type checkers alone, is not among them.
    """
    files, found = files_below(ROOT), set[Path]()
    statements: list[ast.stmt] = [*parsed(path.read_text(encoding="utf-8")).body]
    while statements:
        node = statements.pop()
        is_apart = isinstance(node, ast.FunctionDef) or (
            isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        )
        if not is_apart:
            statements += [n for n in ast.iter_child_nodes(node) if isinstance(n, ast.stmt)]
        if isinstance(node, ast.ImportFrom) and node.level:
            base = path.parents[node.level - 1].joinpath(*(node.module or "").split("."))
            for name in (alias.name for alias in node.names):
                places = {(base / name).with_suffix(".py"), base / name / "__init__.py"} & files
                found |= places or {base.with_suffix(".py"), base / "__init__.py"} & files
    return found


def circles(files: list[Path]) -> list[list[Path]]:
    """Return groups of files that import one another in a circle."""
    imports = {path: imported_at_once(path) & set(files) for path in files}
    reached: dict[Path, set[Path]] = {}
    for path in files:
        reached[path], left = set(), [path]
        while left:
            new = imports[left.pop()] - reached[path]
            reached[path] |= new
            left += new
    groups = {frozenset(p for p in reached[q] if q in reached[p]) for q in files}
    return sorted(sorted(group) for group in groups if group)


@pytest.mark.parametrize("folder", sorted({unit(p) for p in FILES if p.parent != ROOT}))
def test_no_circles_inside_a_folder(folder: str) -> None:
    assert circles([p for p in FILES if unit(p) == folder]) == []


def test_circles_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {
        "__init__": "",
        "one": "from . import two\n",
        "two": "if True:\n    from .three import f\n",
        "three": "from .one import g\ndef f():\n    from .four import h\n",
        "four": "from .five import g\nfrom ..x import three\n",
        "five": "if TYPE_CHECKING:\n    from .four import g\n",
    }
    files = {name: tmp_path / "x" / f"{name}.py" for name in texts}
    (tmp_path / "x").mkdir()
    for name, text in texts.items():
        files[name].write_text(text)
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    circle = sorted(files[name] for name in ("one", "two", "three"))
    assert circles(list(files.values())) == [circle]


def test_every_file_has_a_floor() -> None:
    units = {unit(p) for p in FILES} - {"__init__", "__main__"}
    assert units <= set(FLOOR_OF)


def told(check: Callable[[Path], list[str]]) -> list[str]:
    """Return what a check says of every file, with its name."""
    return [f"{path.relative_to(ROOT)}: {said}" for path in FILES for said in check(path)]


def not_downwards(path: Path) -> list[str]:
    """Return the imports of a file that it must not have."""
    here, wrong = unit(path), []
    if here in ("__init__", "__main__"):
        return []  # the top of the package offers everything
    for line, name in imported(path):
        parts = name.split(".")
        if parts[0] != "relax_fusion":
            if FLOOR_OF[here] == 0 and parts[0] in HEAVY - USES.get(path, set()):
                wrong.append(f"line {line}: floor 0 imports {name}")
            continue
        there = parts[1] if len(parts) > 1 else "__init__"
        if there == here:
            continue
        if there == "__init__" or there == "__version__":
            wrong += [] if FLOOR_OF[here] >= 4 else [f"line {line}: imports the whole package"]
        elif name == "relax_fusion.hardware.target" and FLOOR_OF[here] == 0:
            wrong.append(f"line {line}: floor 0 imports {name}, which imports TVM")
        elif there not in FLOOR_OF:
            wrong.append(f"line {line}: {name} is no part of the package")
        elif FLOOR_OF[there] > FLOOR_OF[here]:
            wrong.append(f"line {line}: upward, from {here} to {there}")
        elif here in SIBLINGS and there in SIBLINGS:
            wrong.append(f"line {line}: sideways, from {here} to {there}")
    return wrong


def test_imports_go_downwards() -> None:
    assert told(not_downwards) == []


def test_the_checks_see_what_they_must(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in {
        "passes/one.py": "from ..dlight_rules import steps\n",
        "hardware/devices.py": "import numpy as np\n",
        "estimator/cost.py": "from ..hardware.target import device_of\n",
        "matching/rope.py": "def f():\n    from ..pipeline import PHASES\n",
        "report/tables.py": "from .. import cli\n",
        "cli/compile.py": "from ..studio import report_html\n",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        monkeypatch.setitem(globals(), "ROOT", tmp_path)
        assert len(not_downwards(path)) == 1


def code_lines(function: ast.FunctionDef) -> int:
    """Return the lines of a function's body, without its docstring."""
    first = function.body[0]
    if ast.get_docstring(function, clean=False) is not None:
        first = function.body[min(1, len(function.body) - 1)]
    return function.end_lineno - first.lineno + 1


def is_kernel(function: ast.FunctionDef) -> bool:
    """Tell whether a function is decorated by ``@triton.jit``."""
    names = [d.func if isinstance(d, ast.Call) else d for d in function.decorator_list]
    return any(isinstance(d, ast.Attribute) and d.attr == "jit" for d in names)


def over_budget(path: Path) -> list[str]:
    """Return what is too long in a file: itself, its functions, their parameters."""
    text = path.read_text(encoding="utf-8")
    length = len(text.splitlines())
    over = [f"{length} lines"] if length > MAX_LINES else []
    for node in ast.walk(parsed(text)):
        if isinstance(node, ast.FunctionDef):
            lines = code_lines(node)
            arguments = node.args
            count = len(arguments.posonlyargs) + len(arguments.args) + len(arguments.kwonlyargs)
            most = MAX_KERNEL_LINES if is_kernel(node) else MAX_FUNCTION_LINES
            if lines > most or (count > MAX_PARAMETERS and not is_kernel(node)):
                over.append(f"{node.name}: {lines} lines, {count} parameters")
    return over


def test_budget() -> None:
    assert told(over_budget) == []


def test_what_is_too_long_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "one.py"
    body = "    pass\n" * MAX_FUNCTION_LINES
    path.write_text(f"def f():\n{body}\ndef g(a, b, c, d, e, *, f, g): pass\n")
    assert over_budget(path) == []
    path.write_text(f"def f():\n{body}    pass\ndef g(a, b, c, d, e, *, f, g, h): pass\n")
    assert over_budget(path) == ["f: 51 lines, 0 parameters", "g: 1 lines, 8 parameters"]
    path.write_text("x = 1\n" * (MAX_LINES + 1))
    assert over_budget(path) == ["351 lines"]
