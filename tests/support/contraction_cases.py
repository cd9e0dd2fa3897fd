"""Contraction workloads with inputs and a float64 reference, for any target.

`cases()` lists them, `Case.check` judges the results; neither needs a GPU or TVM.  The CPU tests
run all of them, and a machine with a GPU runs the same ones.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

import ml_dtypes
import numpy as np

from relax_fusion.workload import (
    ACTIVATIONS,
    Dim,
    DynamicDim,
    GatedFFN,
    HeadNorm,
    Norm,
    NormMatmul,
    PostNorm,
    Projection,
    Rope,
    WeightLayout,
    extent,
)
from relax_fusion.workload.dims import part_of
from relax_fusion.workload.reference import evaluate

from .workloads import Arrays, inputs, results, rounding

RMS, LAYER = Norm("rms", 1e-5), Norm("layer", 1e-5, beta=True)
OFFSET = replace(RMS, unit_offset=True)
EACH = replace(LAYER, unit_offset=True, each=3)
POST = PostNorm(1e-5, unit_offset=True)
POST_SUM = Norm("none", 0.0, residual=True, first=POST)
ROWS, COLUMNS = DynamicDim("rows"), DynamicDim("vocab_size")
DYNAMIC_ROWS = (1, 3, 4, 7, 33)


@dataclass(frozen=True)
class Case:
    """A workload and the value of its rows, where they are dynamic.

    Parameters
    ----------
    name : str
        For test reports.
    work : NormMatmul or GatedFFN
        What to compute.
    dynamic_rows, dynamic_columns : int
        Values of the dynamic dimensions.
    """

    name: str
    work: NormMatmul | GatedFFN
    dynamic_rows: int = 0
    dynamic_columns: int = 0

    @property
    def rows(self) -> int:
        """Rows of x."""
        return extent(self.work.rows, self.dynamic_rows)

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes of the dynamic dimensions, by name."""
        values = {"rows": self.rows, "columns0": self.dynamic_columns}
        values |= {d: -(-self.rows // part_of(d)) for d in self.work.graph.dims if part_of(d)}
        return {"rows": self.rows, **{d: values.get(d, 3) for d in self.work.graph.dims}}

    def inputs(self) -> Arrays:
        """Return the operands by name, in order."""
        return inputs(self.work, self.sizes, seed=11)

    def out_shapes(self) -> list[tuple[tuple[int, ...], str]]:
        """Return shape and dtype of every result, in order."""
        return results(self.work, self.sizes)

    def reference(self, arrays: Arrays, dtype: str, stored: bool = False) -> list[np.ndarray]:
        """Compute every result, step by step, with sums and intermediates in `dtype`.

        `stored`: the norm is rounded to the workload's dtype, as where it is a tensor of its own.
        """
        norm = ("x_norm",) if stored else ()
        return list(evaluate(self.work.graph, arrays, dtype, rounding(*norm)).values())

    def normalised(self, arrays: Arrays, dtype: str) -> np.ndarray:
        """Return the normalised rows, computed in `dtype`."""
        assert self.work.norm is not None
        work = replace(self.work, norm=replace(self.work.norm, returns_norm=True))
        return evaluate(work.graph, arrays, dtype)["x_norm"]

    def check(self, arrays: Arrays, found: list[np.ndarray], stored: bool = False) -> None:
        """Assert that every result errs at most twice as much as numpy's float32 steps do.

        `stored`: as numpy's with a norm that is rounded to the workload's dtype.

        Added are one rounding step of the result's dtype at its largest value, and what the float32
        sums of k terms may differ by when they are added in another order (k / 8 steps, as eight
        or more partial sums are kept; numpy's own error can be zero by chance).
        """
        exact_all = self.reference(arrays, "float64")
        plain_all = self.reference(arrays, "float32", stored)
        assert len(found) == len(exact_all)
        for index, (got, exact, plain) in enumerate(zip(found, exact_all, plain_all, strict=True)):
            assert got.shape == exact.shape
            if not got.size:  # no rows
                continue
            largest = float(np.abs(exact).max())
            rounded = plain.astype(got.dtype).astype(np.float64)
            order = (self.work.k / 8 + 1) * float(np.finfo(np.float32).eps)
            step = float(ml_dtypes.finfo(got.dtype).eps)
            allowed = 2 * np.abs(rounded - exact).max() + (step + order) * largest
            error = np.abs(got.astype(np.float64) - exact).max()
            where = f"{self.name}, result {index}"
            assert error <= allowed, f"{where}: error {error:.3g}, allowed {allowed:.3g}"


def plain(n: Dim, *epilogue: str, layout: WeightLayout = "nk") -> Projection:
    """Return a projection."""
    return Projection(n, layout, epilogue)


BASE = NormMatmul(7, 64, (plain(48),), RMS, "float32", "float32")
GATED = GatedFFN(7, 64, 48, "nk", True, True, "silu", RMS, "float32", "float32")
THREE = (plain(48), plain(16, "bias"), plain(32))


def _norms() -> list[Case]:
    after_add = replace(RMS, residual=True, returns_sum=True)
    everything = replace(LAYER, residual=True, returns_sum=True, returns_norm=True)
    found = {
        "plain": replace(BASE, norm=None),
        "rms": BASE,
        "layer": replace(BASE, norm=LAYER),
        "layer_no_beta": replace(BASE, norm=Norm("layer", 1e-5)),
        "residual": replace(BASE, norm=replace(RMS, residual=True)),
        "residual_sum": replace(BASE, norm=after_add),
        "norm_out": replace(BASE, norm=replace(LAYER, returns_norm=True)),
        "sum_and_norm_out": replace(BASE, norm=everything),
        "post": replace(BASE, norm=replace(after_add, first=POST)),
        "post_layer": replace(BASE, norm=replace(everything, first=POST), outputs=THREE),
        "post_sum": replace(BASE, norm=POST_SUM),
        "three": replace(BASE, outputs=THREE),
        "three_layer_sum": replace(BASE, outputs=THREE, norm=everything),
        "mixed_layouts": replace(BASE, outputs=(plain(48), plain(32, layout="kn"))),
        "unit_offset": replace(BASE, norm=OFFSET),
        "for_each_sequence": replace(BASE, rows=12, norm=EACH),
        "for_each_sequence_sum": replace(BASE, rows=12, norm=replace(everything, each=4)),
        "unit_offset_layer": replace(BASE, norm=replace(everything, unit_offset=True)),
        "kn": replace(BASE, outputs=(plain(48, layout="kn"),)),
        "kn_layer": replace(BASE, outputs=(plain(48, "bias", layout="kn"),), norm=LAYER),
    }
    return [Case(name, work) for name, work in found.items()]


def _epilogues() -> list[Case]:
    steps = [(a,) for a in ACTIVATIONS]
    steps += [
        ("bias",),
        ("residual",),
        ("bias", "gelu"),
        ("bias", "residual"),
        ("silu", "residual"),
        ("bias", "scale", 0.5, "residual", "residual"),
    ]
    groups = ("bias", "scale:4", "bias:6", "residual:5", "residual")
    return [
        *(
            Case("_".join(map(str, s)), replace(BASE, outputs=(plain(48, *s),), norm=None))
            for s in steps
        ),
        Case("rows_in_groups", replace(BASE, rows=12, outputs=(plain(48, *groups),), norm=None)),
    ]


def _gated() -> list[Case]:
    found = {f"gated_{a}": replace(GATED, activation=a) for a in ACTIVATIONS}
    found |= {
        "gated_bias": replace(GATED, bias=True),
        "gated_up_first": replace(GATED, gate_first=False),
        "gated_for_each_sequence": replace(GATED, rows=12, norm=replace(EACH, kind="rms")),
        "gated_separate": replace(GATED, merged=False),
        "gated_separate_bias": replace(GATED, merged=False, bias=True),
        "gated_separate_kn": replace(GATED, merged=False, layout="kn"),
        "gated_kn": replace(GATED, layout="kn"),
        "gated_no_norm": replace(GATED, norm=None),
        "gated_sum": replace(GATED, norm=replace(RMS, residual=True, returns_sum=True)),
        "gated_post_sum": replace(GATED, norm=replace(POST_SUM, returns_sum=True)),
        "gated_half": replace(GATED, dtype="float16", out_dtype="float16", rows=1),
        "gated_unit_offset": replace(GATED, norm=OFFSET),
        "gated_odd": replace(GATED, n=33, k=7),
    }
    return [Case(name, work) for name, work in found.items()]


def turned(rope: Rope, n: int, *epilogue: str, layout: WeightLayout = "nk") -> Projection:
    """Return a projection whose heads are rotated."""
    return Projection(n, layout, epilogue, rope)


ROPE = Rope(16, 48, "float32")
PART = replace(ROPE, rotary_dim=8)
NEIGHBOURS = replace(ROPE, pairing="neighbours")
TURNS = replace(ROPE, features=32, period=48)
FORMS = {
    "part": PART,
    "part_by_pair": replace(PART, rotary_dim=4, by_pair=True),
    "neighbours": NEIGHBOURS,
    "neighbours_by_pair": replace(NEIGHBOURS, by_pair=True, positions=3),
    "neighbours_part": replace(NEIGHBOURS, rotary_dim=6),
    "neighbours_part_by_pair": replace(NEIGHBOURS, rotary_dim=12, by_pair=True),
    "turns": TURNS,
    "turns_part": replace(TURNS, rotary_dim=4, positions=3),
    "turns_neighbours": replace(TURNS, rotary_dim=8, pairing="neighbours"),
}
"""What of a head is rotated, beside all of it by halves, and which heads; for 96 features."""


def _rotated() -> list[Case]:
    half = replace(ROPE, features=32, dtype="float16")
    found = {
        "rope": replace(BASE, outputs=(turned(ROPE, 48),)),
        "rope_prefix": replace(BASE, outputs=(turned(replace(ROPE, features=32), 64),)),
        "rope_bias": replace(BASE, outputs=(turned(ROPE, 80, "bias"),)),
        "rope_kn": replace(BASE, outputs=(turned(ROPE, 80, "bias", layout="kn"),)),
        "rope_positions": replace(BASE, outputs=(turned(replace(ROPE, positions=3), 64),)),
        "rope_one_position": replace(BASE, outputs=(turned(replace(ROPE, positions=1), 64),)),
        "rope_no_norm": replace(BASE, outputs=(turned(ROPE, 48),), norm=None),
        "rope_odd_heads": replace(BASE, outputs=(turned(Rope(6, 18, "float32"), 30),), k=50),
        "rope_odd_heads_kn": replace(
            BASE, outputs=(turned(Rope(6, 18, "float32"), 30, layout="kn"),), k=50
        ),
        "rope_three": replace(BASE, outputs=(turned(ROPE, 48), turned(half, 32), plain(32))),
        "rope_wide": replace(BASE, outputs=(turned(Rope(48, 48, "float32"), 48),), rows=1),
        "rope_half": replace(
            BASE, outputs=(turned(half, 64),), dtype="float16", out_dtype="float16"
        ),
        "rope_one_row": replace(BASE, outputs=(turned(ROPE, 64),), rows=1),
    }
    layouts: tuple[WeightLayout, ...] = ("nk", "kn")
    for (name, rope), layout in product(FORMS.items(), layouts):
        outputs = (turned(rope, 96, "bias", layout=layout),)
        found[f"rope_{name}_{layout}"] = replace(BASE, outputs=outputs)
    return [Case(name, work) for name, work in found.items()]


def normed(projection: Projection, width: int, **how: bool) -> Projection:
    """Return a projection whose heads, or whole rows, are normalised."""
    return replace(projection, head_norm=HeadNorm(width, 1e-3, **how))


def head_cases() -> list[Case]:
    """Return static cases of norms of heads, which kernels of CPUs have."""
    q, k = normed(turned(ROPE, 48), 16), normed(turned(replace(ROPE, features=32), 32), 16)
    rounded = normed(turned(ROPE, 48), 48, unit_offset=True, rounds=True)
    odd = normed(turned(Rope(6, 30, "float32"), 30, "bias", layout="kn"), 6)
    found: dict[str, NormMatmul] = {
        "three": replace(BASE, outputs=(q, k, plain(32))),
        "rows": replace(BASE, outputs=(normed(turned(ROPE, 48, "bias"), 48, unit_offset=True),)),
        "half": replace(HALF, outputs=(q, rounded), norm=RMS),
        "bfloat16": replace(BASE, dtype="bfloat16", out_dtype="bfloat16", outputs=(rounded, k)),
        "alone": replace(BASE, outputs=(normed(plain(96, layout="kn"), 32),), norm=None),
        "odd": replace(BASE, outputs=(odd,), k=50),
        "one_row": replace(BASE, outputs=(q,), rows=1, norm=None),
    }
    for width, pairing in product((64, 96, 128, 256), ("halves", "neighbours")):
        rope = Rope(width, 2 * width, "float32", 3, width // 2, pairing)  # half of a head turns
        outputs = (normed(turned(rope, 2 * width, layout="kn"), width), plain(8, layout="kn"))
        found[f"{width}_{pairing}"] = replace(BASE, outputs=outputs)
    for name, rope in FORMS.items():
        found[name] = replace(BASE, outputs=(normed(turned(rope, 96), 16),))
    return [Case(f"heads_{name}", work) for name, work in found.items()]


def _sizes() -> list[Case]:
    odd = [(50, 48), (48, 50), (7, 33), (33, 7), (31, 37), (64, 1), (1, 48), (1, 1)]
    layouts: tuple[WeightLayout, ...] = ("nk", "kn")
    found = []
    for number, ((k, n), layout) in enumerate(product(odd, layouts)):
        rows = (1, 3, 3, 1)[number % 4]
        work = replace(BASE, rows=rows, k=k, outputs=(plain(n, layout=layout),))
        found.append(Case(f"size_{k}x{n}_{layout}_{rows}", work))
    return [*found, *(Case(f"rows_{r}", replace(BASE, rows=r)) for r in DYNAMIC_ROWS)]


def _dtypes() -> list[Case]:
    pairs = [("float16", "float16"), ("bfloat16", "bfloat16"), ("float16", "float32")]
    return [
        Case(
            f"{dtype}_to_{out}_{layout}_{rows}",
            NormMatmul(rows, 96, (plain(40, "bias", layout=layout),), LAYER, dtype, out),
        )
        for dtype, out in pairs
        for layout, rows in (("nk", 1), ("kn", 4))
    ]


HALF = NormMatmul(77, 72, (plain(80),), None, "float16", "float16")
HALF_GATED = replace(GATED, rows=77, k=72, n=80, norm=None, dtype="float16", out_dtype="float16")
HALF_ROPE = replace(ROPE, features=32, dtype="float16")


def tensor_core_cases() -> list[Case]:
    """Return cases of many rows in half precision, for which a GPU has plans of the family "mma".

    No size is a multiple of a tile, and copies of 16, 8 and 4 bytes are needed.
    """
    steps = ("bias", "residual")
    found = {
        "nk": HALF,
        "kn": replace(HALF, outputs=(plain(80, layout="kn"),)),
        "bfloat16": replace(HALF, dtype="bfloat16", out_dtype="bfloat16"),
        "float32_out": replace(HALF, out_dtype="float32", outputs=(plain(80, *steps),)),
        "steps": replace(HALF, outputs=(plain(80, *steps, "gelu"),)),
        "steps_of_groups": replace(
            HALF, outputs=(plain(80, "scale:11", "bias:7", "residual:9", *steps),)
        ),
        "steps_kn": replace(HALF, outputs=(plain(80, *steps, layout="kn"),)),
        "k_68": replace(HALF, k=68, outputs=(plain(66, *steps),)),
        "k_70": replace(HALF, k=70, outputs=(plain(41, "bias"),)),
        "k_70_kn": replace(HALF, k=70, outputs=(plain(42, "bias", layout="kn"),)),
        "one_tile": replace(HALF, rows=32, k=64, outputs=(plain(32),)),
        "gated": HALF_GATED,
        "gated_kn": replace(HALF_GATED, layout="kn"),
        "gated_separate": replace(HALF_GATED, merged=False, bias=True),
        "gated_up_first": replace(HALF_GATED, gate_first=False, bias=True),
        "rope": replace(HALF, outputs=(turned(HALF_ROPE, 64),)),
        "rope_kn": replace(HALF, outputs=(turned(ROPE, 80, "bias", layout="kn"),)),
        "rope_odd_heads": replace(HALF, outputs=(turned(Rope(6, 18, "float32"), 30),)),
        "rope_positions": replace(HALF, outputs=(turned(replace(ROPE, positions=3), 64),)),
        "three": replace(HALF, outputs=(turned(ROPE, 48), plain(32, "bias"), plain(16))),
        **{
            f"rope_{name}": replace(HALF, outputs=(turned(rope, 96, "bias"),))
            for name, rope in FORMS.items()
        },
    }
    return [Case(f"tensor_{name}", work) for name, work in found.items()]


def few_rows_cases() -> list[Case]:
    """Return cases of few rows in half precision, the family "few_rows".

    Rows do not fill tiles, nor columns most blocks, and the last step along k has a tail.
    """
    few = replace(HALF, rows=5, k=264, outputs=(plain(40),))
    gated = replace(HALF_GATED, rows=3, k=136, n=40)
    bfloat = {"dtype": "bfloat16", "out_dtype": "bfloat16"}
    found = {
        "nk": few,
        "kn": replace(few, rows=9, outputs=(plain(72, layout="kn"),)),
        "one": replace(few, rows=1, outputs=(plain(33, "bias"),)),
        "sixteen": replace(few, rows=16, k=1032, out_dtype="float32"),
        "seventeen": replace(few, rows=ROWS),
        "tiny": replace(few, k=8, outputs=(plain(1),)),
        "bfloat16": replace(few, **bfloat),
        "bfloat16_kn": replace(few, outputs=(plain(8, layout="kn"),), **bfloat),
        "steps": replace(few, outputs=(plain(40, "bias", "residual", "gelu"),)),
        "rms": replace(few, norm=RMS),
        "unit_offset": replace(few, norm=OFFSET),
        "unit_offset_layer": replace(few, rows=1, norm=replace(LAYER, unit_offset=True)),
        "layer": replace(few, norm=LAYER, rows=11, **bfloat),
        "layer_one": replace(few, norm=LAYER, rows=1, k=4104),
        "rms_kn": replace(few, norm=RMS, outputs=(plain(72, layout="kn"),)),
        "gated": gated,
        "gated_kn": replace(gated, layout="kn", rows=12),
        "gated_rms": replace(gated, norm=RMS, gate_first=False),
        "gated_separate": replace(gated, merged=False, bias=True),
        "rope": replace(few, outputs=(turned(HALF_ROPE, 64),), norm=RMS),
        "rope_part": replace(few, outputs=(turned(FORMS["turns_part"], 96),)),
        "rope_neighbours": replace(few, outputs=(turned(FORMS["neighbours_part"], 96, "bias"),)),
        "rope_kn": replace(few, outputs=(turned(ROPE, 80, "bias", layout="kn"),)),
        "three": replace(few, outputs=(turned(ROPE, 48), plain(32, "bias"), plain(16)), norm=RMS),
    }
    return [Case(f"few_{name}", work, 17) for name, work in found.items()]


def cases() -> list[Case]:
    """Return the static cases; each is a kernel of its own."""
    return [*_norms(), *_epilogues(), *_gated(), *_rotated(), *_sizes(), *_dtypes()]


def dynamic_works() -> dict[str, NormMatmul | GatedFFN]:
    """Return workloads to compile once and to run for each of `DYNAMIC_ROWS`."""
    return {
        "rms": replace(BASE, rows=ROWS),
        "layer_half": replace(BASE, rows=ROWS, norm=LAYER, dtype="float16", out_dtype="float16"),
        "kn": replace(BASE, rows=ROWS, outputs=(plain(48, layout="kn"),)),
        "gated": replace(GATED, rows=ROWS),
        "odd": replace(BASE, rows=ROWS, k=50, outputs=(plain(33, "bias"),)),
        "three": replace(BASE, rows=ROWS, outputs=THREE),
        "scale_of_sequences": replace(BASE, rows=ROWS, outputs=(plain(48, "bias:3", "scale:3"),)),
        "rope": replace(BASE, rows=ROWS, outputs=(turned(ROPE, 64),)),
        "rope_positions": replace(
            BASE, rows=ROWS, outputs=(turned(replace(ROPE, positions=DynamicDim("s")), 64),)
        ),
    }
