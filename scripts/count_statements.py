"""Count the statements of everything that is shipped, by folder.

python scripts/count_statements.py

Python: every statement of `relax_fusion/` and `relax_fusion_command.py`, kernels of Triton among
them; a docstring is none.  C: every line of code, in `launcher.h` and in the strings of the files
`MAKE_C`, that ends in a semicolon (a statement) or in an opening brace (a block, whose closing one
is counted with it); what is put into an f-string counts as one word.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "relax_fusion"
MAKE_C = (
    "dlight_rules/tensor_cores/wgmma_kernel.py",
    "transforms/cuda_graph.py",
    "launch/launcher.py",
)
COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)
LINE_OF_C = re.compile(r"[;{] *$", re.MULTILINE)


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    counts = shipped()
    for folder, count in sorted(counts.items()):
        print(f"{count:6}  {folder}")
    print(f"{counts.total():6}  in total")


def shipped() -> Counter[str]:
    """Return the statements of each folder of the package, of its root and of the command."""
    counts: Counter[str] = Counter()
    for path in [*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.h"), ROOT / "relax_fusion_command.py"]:
        folder = "/".join(path.relative_to(ROOT).parts[:-1][:2]) or path.name
        text = path.read_text(encoding="utf-8")
        counts[folder] += of_c(text) if path.suffix == ".h" else of_python(text)
        if path in map(PACKAGE.joinpath, MAKE_C):
            counts[folder] += sum(map(of_c, strings(text)))
    return counts


def of_python(text: str) -> int:
    """Return the statements of Python code, without docstrings."""
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.stmt)]
    return sum(not isinstance(n, ast.Expr) or not is_text(n.value) for n in nodes)


def strings(text: str) -> list[str]:
    """Return the strings of Python code, the docstrings among them."""
    nodes = list(ast.walk(ast.parse(text)))
    joined = [node for node in nodes if isinstance(node, ast.JoinedStr)]
    parts = {id(part) for node in joined for part in node.values}
    found = [node.value for node in nodes if is_text(node) and id(node) not in parts]
    return found + ["".join(p.value if is_text(p) else "x" for p in n.values) for n in joined]


def is_text(node: ast.AST) -> bool:
    """Tell whether a node is a string without anything put into it."""
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def of_c(text: str) -> int:
    """Return the lines of C that end in a semicolon or an opening brace."""
    return len(LINE_OF_C.findall(COMMENT.sub("", text)))


if __name__ == "__main__":
    main()
