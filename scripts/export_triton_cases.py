"""Write the Triton test cases as libraries, on a machine without a GPU, for one that has one.

    python scripts/export_triton_cases.py OUT_DIR [--target h200]

On the other machine, with OUT_DIR copied there:

    RELAX_FUSION_EXPORTED=OUT_DIR python -m pytest tests/gpu -k made_without_a_gpu
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from relax_fusion import make_target
from tests.gpu.triton_cases import CASES, build


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--target", default="h200", help="a device of the table (default: h200)")
    args = parser.parse_args()
    args.directory.mkdir(parents=True, exist_ok=True)
    target = make_target(args.target)
    for case in CASES:
        stem = args.directory / case.name
        build(case.bare_module(target), target).export_library(f"{stem}.so")
        np.savez(f"{stem}.in.npz", **{f"in{i}": x for i, x in enumerate(case.inputs(3))})
        print(f"{stem}.so: {Path(f'{stem}.so').stat().st_size / 1024:.0f} KB")


if __name__ == "__main__":
    main()
