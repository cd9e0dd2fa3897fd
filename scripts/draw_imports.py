"""Draw which parts of the package import which, as a Mermaid flowchart, into docs/architecture.md.

python scripts/draw_imports.py            # rewrites the picture
python scripts/draw_imports.py --check    # exit status 1 if it is out of date
"""

from __future__ import annotations

import argparse
import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "relax_fusion"
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "```mermaid\n", "```\n"
ALONE = ("pipeline",)
"""Modules of the root that are drawn; the others hold errors, options and checks of them."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    args = parser.parse_args()
    text = PAGE.read_text(encoding="utf-8")
    new = with_picture(text)
    if not args.check:
        PAGE.write_text(new, encoding="utf-8")
    elif new != text:
        print(f"{PAGE.relative_to(ROOT)} is out of date: python scripts/draw_imports.py")
    return int(args.check and new != text)


def with_picture(text: str) -> str:
    """Return the page with the picture of today's imports."""
    before, _, rest = text.partition(BEGIN)
    return before + BEGIN + picture() + END + rest.partition(END)[2]


def picture() -> str:
    """Return the flowchart: an arrow from A to B where A imports B."""
    arrows = sorted({(a, b) for a in parts() for b in imported(a) if a != b and b in parts()})
    reached = {(a, c) for a, b in arrows for b2, c in arrows if b == b2}
    direct = [f"  {a} --> {b}\n" for a, b in arrows if (a, b) not in reached]
    return "flowchart TD\n" + "".join(direct)


def parts() -> list[str]:
    """Return the folders of the package, and the modules that stand for themselves."""
    folders = [p.name for p in PACKAGE.iterdir() if (p / "__init__.py").exists()]
    return sorted([*folders, *ALONE])


def imported(part: str) -> set[str]:
    """Return the parts that a part imports."""
    place = PACKAGE / part
    files = place.rglob("*.py") if place.is_dir() else [place.with_suffix(".py")]
    found = set()
    for path in files:
        package = ("relax_fusion", *path.relative_to(PACKAGE).parent.parts)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                base = package[: len(package) - node.level + 1] if node.level else ()
                names = (*base, *(node.module or "").split("."))
                found.update(names[1:2] if names[0] == "relax_fusion" else ())
    return found


if __name__ == "__main__":
    sys.exit(main())
