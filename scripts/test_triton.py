"""Run the Triton bridge's tests with other versions of Triton than the installed one.

    python scripts/test_triton.py 3.6.0 3.9.0

Each version is downloaded into a temporary directory that comes first on the import path; the
environment is left as it is.  Triton 3.6's interpreter calls ``int()`` on arrays of one element,
which NumPy refuses from 2.4 on: there, an older NumPy comes along.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def run(version: str) -> bool:
    """Return whether the tests pass with `version`."""
    with tempfile.TemporaryDirectory() as directory:
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", directory]
        packages = [f"triton=={version}"]
        if version.startswith("3.6."):
            packages.append("numpy<2.4")
        subprocess.run([*pip, *packages], check=True)
        path = os.pathsep.join([directory, str(ROOT), os.environ.get("PYTHONPATH", "")])
        env = {**os.environ, "PYTHONPATH": path}
        asked = "import triton; print(triton.__version__)"
        found = subprocess.run(
            [sys.executable, "-c", asked], env=env, capture_output=True, text=True, check=True
        ).stdout.strip()
        if found.split("+")[0] != version:
            raise SystemExit(f"Triton {found} is imported where {version} was installed")
        print(f"Triton {found}", flush=True)
        tests = [sys.executable, "-m", "pytest", "-q", "tests/triton_bridge"]
        return subprocess.run(tests, env=env, cwd=ROOT, check=False).returncode == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("versions", nargs="+", help="versions on PyPI, such as 3.6.0")
    failed = [version for version in parser.parse_args().versions if not run(version)]
    if failed:
        raise SystemExit(f"failed with Triton {', '.join(failed)}")


if __name__ == "__main__":
    main()
