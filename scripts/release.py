"""Check whether this tree can be released, step by step; nothing is published or tagged.

pip install -c constraints.txt -e '.[dev,docs]'
python scripts/release.py                    all steps
python scripts/release.py --only version,build

Each step says ok, or what is wrong; the exit code is the number of steps that failed.  The packages
are in `dist/` then.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SMOKE = ("--version",), ("explain", "gpt2", "--html", "report.html"), ("demo", "--quick")
"""Arguments of `relax-fusion` that an installed wheel has to take, outside of the tree."""

NOT_PACKED = (".ci/", ".gitignore")
"""Of the files under version control, those that no sdist has."""


class Failed(Exception):
    """A step failed; the message says why, on one line."""


def version(root: Path = ROOT) -> str:
    """Return the version of pyproject.toml."""
    text = (root / "pyproject.toml").read_text(encoding="utf-8")
    found = re.search(r'^version = "([^"]+)"$', text, re.MULTILINE)
    if found is None:
        raise Failed("pyproject.toml has no version")
    return found[1]


def check_version(root: Path = ROOT) -> str:
    """Check that everything names one version, which the changelog no longer calls unreleased."""
    own = version(root)
    places = {
        "relax_fusion/__init__.py": rf'^__version__ = "{re.escape(own)}"$',
        "CITATION.cff": rf"^version: {re.escape(own)}$",
        "CHANGELOG.md": rf"^## {re.escape(own)} \(\d{{4}}-\d\d-\d\d\)$",
    }
    for name, pattern in places.items():
        if not re.search(pattern, (root / name).read_text(encoding="utf-8"), re.MULTILINE):
            raise Failed(f"{name} has no line {pattern}, for version {own}")
    return own


def check_tree() -> str:
    """Check that nothing is uncommitted, and that the version has no tag yet."""
    changed = _run("git", "status", "--porcelain").splitlines()
    if changed:
        raise Failed(f"{len(changed)} file(s) are not committed, the first: {changed[0]}")
    tag = f"v{version()}"
    if tag in _run("git", "tag", "--list").split():
        raise Failed(f"the tag {tag} exists")
    return f"clean; {tag} is free"


def check_code() -> str:
    """Check style and types."""
    for arguments in (("ruff", "check", "."), ("ruff", "format", "--check", "."), ("mypy",)):
        _run(sys.executable, "-m", *arguments)
    return "ruff and mypy find nothing"


def check_docs() -> str:
    """Build the site of the documents; a warning is an error."""
    with tempfile.TemporaryDirectory() as site:
        _run(sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", site)
    return "built without a warning"


def build() -> str:
    """Build wheel and sdist, and check that they hold the files under version control alone."""
    _run(sys.executable, "-m", "build", "--outdir", "dist")
    wheel, sdist = packages(ROOT / "dist", version())
    tracked = {n for n in _run("git", "ls-files").splitlines() if not n.startswith(NOT_PACKED)}
    check_contents(contents(wheel), {n for n in tracked if n.startswith("relax_fusion")}, wheel)
    check_contents(contents(sdist), tracked, sdist)
    return ", ".join(f"{each.name} ({each.stat().st_size >> 10} KiB)" for each in (wheel, sdist))


def check_contents(found: set[str], wanted: set[str], package: Path) -> None:
    """Check that a package has the files that are wanted, and none but those that tools write."""
    written = re.compile(r"relax_fusion[\w.-]*\.(dist|egg)-info/.*|PKG-INFO|setup\.cfg")
    more = {name for name in found - wanted if not written.fullmatch(name)}
    for what, names in (("misses", wanted - found), ("has too much:", more)):
        if names:
            raise Failed(f"{package.name} {what} {len(names)} file(s), the first: {min(names)}")


def packages(directory: Path, own: str) -> tuple[Path, Path]:
    """Return wheel and sdist of a version."""
    found = [*directory.glob(f"relax_fusion-{own}-*.whl"), directory / f"relax_fusion-{own}.tar.gz"]
    if len(found) != 2 or not found[1].is_file():
        raise Failed(f"{directory} must hold one wheel and one sdist of {own}")
    return found[0], found[1]


def contents(package: Path) -> set[str]:
    """Return the names of the files in a wheel, or in an sdist below its one folder."""
    if package.suffix == ".whl":
        with zipfile.ZipFile(package) as archive:
            return set(archive.namelist())
    with tarfile.open(package) as archive:
        return {entry.name.partition("/")[2] for entry in archive if entry.isfile()}


def check_wheel() -> str:
    """Install each package into an environment of its own, and run it outside of the tree."""
    for package in packages(ROOT / "dist", version()):
        with tempfile.TemporaryDirectory() as directory:
            venv.create(f"{directory}/venv", with_pip=True)
            tools = Path(directory) / "venv" / "bin"
            own = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
            own["RELAX_FUSION_CACHE_DIR"] = f"{directory}/kernels"
            given = ("-q", "-c", str(ROOT / "constraints.txt"), str(package))
            _run(
                str(tools / "python"), "-m", "pip", "install", *given, cwd=Path(directory), env=own
            )
            for arguments in SMOKE:
                _run(str(tools / "relax-fusion"), *arguments, cwd=Path(directory), env=own)
    return "wheel and sdist install and run"


def _run(*command: str, cwd: Path = ROOT, env: Mapping[str, str] | None = None) -> str:
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        words = " ".join(Path(word).name for word in command[:4])
        raise Failed(f"{words}: {lines[-1].strip() if lines else f'exit code {done.returncode}'}")
    return done.stdout


STEPS: dict[str, Callable[[], str]] = {
    "version": check_version,
    "tree": check_tree,
    "code": check_code,
    "docs": check_docs,
    "build": build,
    "wheel": check_wheel,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the steps that were asked for; return how many failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", metavar="STEP,...", help=f"some of {', '.join(STEPS)} (default: all)"
    )
    only = parser.parse_args(arguments).only
    names = only.split(",") if only else list(STEPS)
    wrong = [name for name in names if name not in STEPS]
    if wrong:
        parser.error(f"--only names {wrong[0]!r}; the steps are {', '.join(STEPS)}")
    failed = 0
    for name in names:
        try:
            print(f"{name:8} ok      {STEPS[name]()}", flush=True)
        except (Failed, OSError) as err:
            failed += 1
            print(f"{name:8} failed  {err}", flush=True)
    return failed


if __name__ == "__main__":
    raise SystemExit(main())
