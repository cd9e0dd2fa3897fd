"""Reshaped results: views where that is safe, copies elsewhere."""

from __future__ import annotations

import numpy as np
import tvm
from tvm import relax

import relax_fusion  # registers the pipeline

from .passes.common import Chain, assert_numbers, module

REFERENCE = "f = R.reshape(x, (6, 4)); m = R.matmul(f, W); "


def lowered(chain: Chain) -> str:
    target = relax_fusion.make_target("llvm")
    mod = relax.get_pipeline("relax_fusion", target=target)(module([chain]))
    return mod["main"].script()


def copies(chain: Chain) -> int:
    return lowered(chain).count("cls.reshape")


RETURNED = Chain("main", "x[2,3,4] W[4,8]", REFERENCE + "y = R.reshape(m, (2, 3, 8))", "y")
TWICE = Chain(
    "main", "x[2,3,4] W[4,8]", REFERENCE + "y = R.reshape(m, (2, 3, 8)); z = R.exp(m)", "y, z"
)
ARGUMENT = Chain("main", "x[2,3,4]", "y = R.reshape(x, (6, 4))", "y")
