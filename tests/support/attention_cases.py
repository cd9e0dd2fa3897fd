"""Attention workloads with inputs and a float64 reference, for any target.

`cases()` lists them, `Case.check` judges a result; neither needs a GPU or TVM.  The CPU tests run
all of them, and a machine with a GPU runs the same ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import ml_dtypes
import numpy as np

from relax_fusion.workload import Attention, Causal, DynamicDim, Heads, Lengths
from relax_fusion.workload.graph import Tensor
from relax_fusion.workload.reference import evaluate, numpy_dtype, rounded

from .accuracy import nudged
from .workloads import Arrays, Edit, inputs, results


@dataclass(frozen=True)
class Case:
    """A workload, the values of its dynamic sizes, and what is special about the inputs.

    Parameters
    ----------
    name : str
        For test reports.
    work : Attention
        What to compute.
    sizes : dict of str to int
        Values of the dynamic dimensions by name; ``kv_capacity`` with `kv_prefix`.
    magnitude : float
        Standard deviation of queries and keys.
    edit : callable, optional
        Changes the inputs in place.
    """

    name: str
    work: Attention
    sizes: dict[str, int] = field(default_factory=dict)
    magnitude: float = 1.0
    edit: Edit | None = None

    def size(self, dim: int | DynamicDim) -> int:
        """Return the value of a dimension."""
        return dim if isinstance(dim, int) else self.sizes[dim.name]

    @property
    def lengths(self) -> tuple[int, int, int]:
        """Batch, query length and number of keys."""
        work = self.work
        return self.size(work.batch), self.size(work.q_len), self.size(work.kv_len)

    @property
    def named(self) -> dict[str, int]:
        """Sizes of the dynamic dimensions, by their names in the graph."""
        lengths = zip(("batch", "q_len", "kv_len"), self.lengths, strict=True)
        return {"kv_capacity": self.sizes.get("kv_capacity", 0), **dict(lengths)}

    def inputs(self) -> Arrays:
        """Return the tensors by name, in the order of the kernel's parameters."""
        work = self.work
        arrays = inputs(work, self.named)
        for name in ("q", "k"):
            arrays[name] *= arrays[name].dtype.type(self.magnitude)
        if work.kv_prefix:
            axis = work.kv_layout.index("s")
            if work.shared:
                arrays["shared"][:, self.lengths[2] :] = np.nan
            for name in ("k", "v"):
                np.moveaxis(arrays[name], axis, 0)[self.lengths[2] :] = np.nan
        if self.edit is not None:
            self.edit(arrays)
        return arrays

    def out_shape(self) -> tuple[int, ...]:
        """Return the shape of the result."""
        return results(self.work, self.named)[0][0]

    def unfused(self, arrays: Arrays, dtype: str, stored: bool = False) -> np.ndarray:
        """Compute the workload step by step, with every intermediate in `dtype`.

        `stored`: the weights are rounded to the workload's dtype, as where they are a tensor.
        """
        given = {**arrays, "kv_len": self.lengths[2]} if self.work.kv_prefix else arrays
        if self.work.lengths is not None:  # H4
            # Not nan_to_num, which leaves the NaN of dtypes that are not NumPy's own.
            given = {**given, **{n: np.where(np.isnan(given[n]), 0, given[n]) for n in "kv"}}
        half = replace(self.work.graph["weight"], dtype=self.work.dtype)

        def rounding(values: np.ndarray, tensor: Tensor) -> np.ndarray:
            return rounded(values, half) if stored and tensor.name == "weight" else values

        return evaluate(self.work.graph, given, dtype, rounding)["out"]

    def check(self, arrays: Arrays, got: np.ndarray, stored: bool = False) -> None:
        """Assert that `got` errs at most twice as much as float32 steps do.

        That is what numpy's make, or what nudging the inputs by half a step does, as it grows over
        the longest sum (see `tests.support.accuracy`).  One rounding step of the result's dtype, at
        the size of the largest value, is added.  `stored`: numpy's steps round the weights, as
        kernels on tensor cores do.
        """
        exact = self.unfused(arrays, "float64")
        out_dtype = numpy_dtype(self.work.out_dtype)
        plain = self.unfused(arrays, "float32", stored).astype(out_dtype).astype(np.float64)
        got = got.astype(np.float64)
        assert np.array_equal(np.isnan(exact), np.isnan(got)), f"{self.name}: NaN in other places"
        if not got.size or np.isnan(exact).all():
            return
        growth = np.sqrt(1 + max(self.lengths[2], self.work.head_dim) / 6)
        near = (self.unfused(_nudged(arrays, seed), "float64") for seed in range(3))
        inputs = growth * max(np.nanmax(np.abs(other - exact)) for other in near)
        step = float(ml_dtypes.finfo(out_dtype).eps) * np.nanmax(np.abs(exact))
        allowed = 2 * max(np.nanmax(np.abs(plain - exact)), inputs) + step
        error = np.nanmax(np.abs(got - exact))
        assert error <= allowed, f"{self.name}: error {error:.3g}, allowed {allowed:.3g}"


def _nudged(arrays: Arrays, seed: int) -> Arrays:
    return {n: a if a.dtype.kind in "bi" else nudged(a, "float32", seed) for n, a in arrays.items()}


def _keys(*counts: int) -> Edit:
    """Say how many keys there are in the batch entries; what lies behind them is not a number."""

    def edit(arrays: Arrays) -> None:
        arrays["lengths"][:] = counts
        for batch, count in zip(range(len(arrays["k"])), counts * 2, strict=False):
            for name in ("k", "v"):
                arrays[name][batch, max(count, 0) :] = np.nan

    return edit


BASE = Attention(
    batch=2,
    q_len=33,
    kv_len=65,
    q_heads=2,
    kv_heads=2,
    head_dim=32,
    v_dim=32,
    scale=32**-0.5,
    causal="none",
    bias_dims=None,
    dtype="float32",
    out_dtype="float32",
)
"""The workload that the cases vary."""


def _case(
    name: str, *, magnitude: float = 1.0, edit: Edit | None = None, **changes: object
) -> Case:
    """Vary `BASE`; ``sizes`` among the changes gives the values of dynamic dimensions."""
    sizes = changes.pop("sizes", {})
    return Case(name, replace(BASE, **changes), sizes, magnitude, edit)


def _hide_all(arrays: Arrays) -> None:
    arrays["bias"][..., 3, :] = -np.inf


def _far_below_zero(arrays: Arrays) -> None:
    # Every score of the first key block is negative, and so far that exp(-score) overflows.
    arrays["bias"][...] -= 200


def _nan_in_query(arrays: Arrays) -> None:
    arrays["q"][1, 5, 1, 3] = np.nan


def _nan_in_key(arrays: Arrays) -> None:
    arrays["k"][0, 40, 0, 0] = np.nan


def _shapes() -> list[Case]:
    tails = [(1, 1), (1, 63), (7, 64), (7, 65), (33, 130), (33, 1)]
    layouts = [("bsnh", "bnsh", "bnsh"), ("bnsh", "bsnh", "bsnh"), ("bnsh", "bnsh", "bnsh")]
    return [
        *(_case(f"tail_{q}x{kv}", q_len=q, kv_len=kv) for q, kv in tails),
        *(
            _case(
                "layout_" + "_".join(names),
                q_layout=names[0],
                kv_layout=names[1],
                out_layout=names[2],
            )
            for names in layouts
        ),
        *(_case(f"head_dim_{d}", head_dim=d, v_dim=d, scale=d**-0.5) for d in (80, 96, 160)),
        _case("v_dim_48", v_dim=48),
        _case("odd_dims", head_dim=20, v_dim=12),
        _case("grouped", q_heads=6, kv_heads=2),
        _case("multi_query", q_heads=3, kv_heads=1),
    ]


def _masks() -> list[Case]:
    causal = [
        _case(f"{kind}_{q}x{kv}", causal=kind, q_len=q, kv_len=kv)
        for kind in ("top_left", "bottom_right")
        for q, kv in ((33, 65), (65, 33), (40, 40), (1, 70))
    ]
    biased = [
        _case(f"bias_{''.join(str(int(d)) for d in dims)}", bias_dims=dims)
        for dims in (
            (True, True, True, True),
            (False, False, True, True),
            (True, False, False, True),
            (False, True, False, False),
        )
    ]
    every = (True, True, True, True)
    return [
        *causal,
        *biased,
        _case("bias_float16", bias_dims=every, bias_dtype="float16", causal="bottom_right"),
        _case("bias_hides_a_row", bias_dims=every, edit=_hide_all),
        _case("bias_far_below_zero", bias_dims=every, edit=_far_below_zero),
    ]


def _hide_all_but_one(arrays: Arrays) -> None:
    arrays["mask"][...] = False
    arrays["mask"][..., 3, 64:] = True


def _hide_a_row(arrays: Arrays) -> None:
    arrays["mask"][..., 5, :] = False


def _nan_in_bias(arrays: Arrays) -> None:
    arrays["bias"][0, 1, 7, 3] = np.nan


def _sinks_far_apart(arrays: Arrays) -> None:
    arrays["sinks"][:] = [-np.inf, 200.0]


def _scores() -> list[Case]:
    every, keys_only = (True, True, True, True), (True, False, False, True)
    square = {"q_len": 70, "kv_len": 70}
    bottom: Causal = "bottom_right"
    return [
        _case("bias_min", bias_dims=every, bias_op="min"),
        _case("bias_min_nan", bias_dims=every, bias_op="min", edit=_nan_in_bias),
        _case(
            "bias_min_of_nan", mask_dims=every, bias_dims=every, bias_op="min", edit=_nan_in_query
        ),
        *(
            _case("mask_" + "".join(str(int(d)) for d in dims), mask_dims=dims)
            for dims in (every, keys_only, (False, True, True, False))
        ),
        _case("mask_hides_a_row", mask_dims=every, causal=bottom, edit=_hide_a_row),
        _case("mask_leaves_one_key", mask_dims=every, edit=_hide_all_but_one),
        _case("mask_and_bias", mask_dims=keys_only, bias_dims=every, causal="top_left"),
        *(
            _case(f"window_{w}_{kind}", window=w, causal=kind, **square)
            for w, kind in ((1, bottom), (20, "top_left"), (33, "none"), (100, bottom))
        ),
        _case("window_behind_the_keys", window=5, q_len=65, kv_len=33),
        _case("window_decode", window=20, causal=bottom, q_len=1, kv_len=200),
        _case("softcap", softcap=5.0, magnitude=3.0),
        _case("softcap_under_bias_min", softcap=5.0, bias_dims=every, bias_op="min"),
        _case("softcap_of_small_scores", softcap=50.0, magnitude=0.1),
        _case("alibi", alibi="float32", causal=bottom, q_heads=6),
        _case("alibi_both_sides", alibi="float16", **square),
        _case("sinks", sinks="float32", q_heads=6, causal="top_left"),
        _case("sinks_far_apart", sinks="float16", causal=bottom, edit=_sinks_far_apart),
        _case("sinks_only", sinks="float32", mask_dims=every, edit=_hide_a_row),
        _case(
            "everything",
            q_heads=6,
            causal=bottom,
            window=40,
            softcap=20.0,
            alibi="float32",
            sinks="bfloat16",
            mask_dims=every,
            bias_dims=keys_only,
        ),
    ]


def _numbers() -> list[Case]:
    half = [
        _case(f"{dtype}_to_{out}", dtype=dtype, out_dtype=out, causal="top_left")
        for dtype, out in (("float16", "float16"), ("bfloat16", "bfloat16"), ("float16", "float32"))
    ]
    return [
        *half,
        _case("large_logits", magnitude=100.0 * 32**0.25),
        _case("nan_in_query", edit=_nan_in_query),
        _case("nan_in_key", edit=_nan_in_key),
    ]


def _dynamic() -> list[Case]:
    batch, q_len, kv_len = DynamicDim("batch"), DynamicDim("q_len"), DynamicDim("kv_len")
    free = {"batch": batch, "q_len": q_len, "kv_len": kv_len}
    same = {"q_len": q_len, "kv_len": q_len}
    sizes = [(1, 1, 1), (3, 1, 130), (2, 16, 64), (1, 70, 33)]
    cache = {"kv_prefix": True, "causal": "bottom_right"}
    return [
        *(
            _case(
                f"dynamic_{b}x{q}x{kv}",
                **free,
                causal="bottom_right",
                sizes={"batch": b, "q_len": q, "kv_len": kv},
            )
            for b, q, kv in sizes
        ),
        _case("dynamic_no_keys", **free, sizes={"batch": 1, "q_len": 3, "kv_len": 0}),
        _case("dynamic_square", **same, causal="top_left", sizes={"q_len": 50}),
        _case("cache", **cache, q_len=4, kv_len=kv_len, sizes={"kv_len": 37, "kv_capacity": 96}),
        _case(
            "cache_dynamic",
            **cache,
            **free,
            kv_layout="bnsh",
            sizes={"batch": 2, "q_len": 17, "kv_len": 100, "kv_capacity": 128},
        ),
        _case("cache_static", kv_prefix=True, kv_len=20, sizes={"kv_capacity": 64}),
        _case(
            "cache_window",
            **cache,
            **free,
            window=25,
            mask_dims=(True, False, True, True),
            sizes={"batch": 2, "q_len": 17, "kv_len": 100, "kv_capacity": 128},
        ),
    ]


def _merged() -> list[Case]:
    batch, q_len, kv_len = DynamicDim("batch"), DynamicDim("q_len"), DynamicDim("kv_len")
    square = {"q_len": q_len, "kv_len": q_len, "causal": "top_left"}
    one = {f"{name}_in": Heads(10, start) for name, start in (("q", 0), ("k", 6), ("v", 8))}
    turns = {f"{name}_in": Heads(9, start, 3) for start, name in enumerate("qkv")}
    pairs = {"k_in": Heads(6, 0, 3), "v_in": Heads(6, 1, 3)}
    return [
        _case("merged", q_heads=6, **one, **square, batch=batch, sizes={"batch": 2, "q_len": 35}),
        _case("merged_few_rows", q_heads=6, **one, q_len=1, kv_len=70),
        _case("merged_in_turns", q_heads=3, kv_heads=3, **turns, **square, sizes={"q_len": 35}),
        _case("merged_keys_and_values", **pairs, q_layout="bnsh", out_layout="bnsh"),
        _case("merged_values", v_in=Heads(5, 1, 3), v_dim=48),
        _case(
            "merged_cache",
            **pairs,
            kv_prefix=True,
            kv_len=kv_len,
            sizes={"kv_len": 37, "kv_capacity": 96},
        ),
    ]


def _counted() -> list[Case]:
    """Return cases whose number of keys a tensor tells."""
    own, one = Lengths("int32", by_batch=True), Lengths("int64", by_batch=False, more=1)
    few = {"q_len": 1, "kv_len": 130, "kv_heads": 1}
    mask, band = {"mask_dims": (True, False, False, True)}, {"causal": "bottom_right"}
    dynamic = {"batch": DynamicDim("batch"), "kv_len": DynamicDim("kv_len")}

    def next_key(arrays: Arrays) -> None:
        _keys(37, 37)(arrays | {"lengths": np.zeros(2)})
        arrays["lengths"][:] = 36

    return [
        _case("counted", **few, lengths=own, edit=_keys(130, 3)),
        _case("counted_none_and_too_many", **few, lengths=own, edit=_keys(-5, 1 << 30)),
        _case("counted_next_key", **few, lengths=one, edit=next_key),
        _case("counted_window", **few, **band, window=5, lengths=own, edit=_keys(130, 3)),
        _case(
            "counted_window_behind_the_end",
            **{**few, **band, "window": 5, "lengths": own},
            edit=_keys(1 << 30, -5),
        ),
        _case("counted_rows_of_last", **band, lengths=own, alibi="float32", edit=_keys(65, 40)),
        _case("counted_top_left", causal="top_left", lengths=own, edit=_keys(20, 0)),
        _case("counted_rows_and_mask", **mask, lengths=own, edit=_keys(65, 20)),
        _case(
            "counted_dynamic",
            **{**few, **dynamic},
            lengths=own,
            edit=_keys(64, 0, 17),
            sizes={"batch": 3, "kv_len": 70},
        ),
    ]


def shared_cases() -> list[Case]:
    """Return cases of keys whose last features all heads share, which CPUs read apart."""
    kv_len, wide = DynamicDim("kv_len"), {"head_dim": 48, "shared": 16}
    pairs = {"k_in": Heads(4, 0, 2), "v_in": Heads(4, 1, 2)}
    cache = {"kv_prefix": True, "causal": "bottom_right", "kv_len": kv_len}
    return [
        _case("shared", **wide, **pairs, causal="top_left", q_len=33, kv_len=33),
        _case("shared_few_rows", **wide, **pairs, q_len=1),
        _case("shared_groups", **wide, q_heads=6, kv_layout="bnsh", q_len=3, dtype="bfloat16"),
        _case("shared_odd", head_dim=21, shared=5, v_dim=16, q_len=2, dtype="float16"),
        _case("shared_all_but_one", head_dim=16, shared=15, q_layout="bnsh"),
        _case("shared_cache", **wide, **cache, sizes={"kv_len": 37, "kv_capacity": 96}),
    ]


def cases() -> list[Case]:
    """Return all cases; with one plan they compile to as many kernels."""
    parts = (_shapes(), _masks(), _scores(), _numbers(), _dynamic(), _merged(), _counted())
    return [case for part in parts for case in part]


def in_half(dtypes: tuple[str, ...] = ("float16",)) -> list[Case]:
    """Return all cases with operands of 16 bits, of these dtypes by turns."""
    found = []
    for case in cases():
        work = case.work
        if work.dtype == "float32":
            dtype = dtypes[len(case.name) % len(dtypes)]
            work = replace(work, dtype=dtype, out_dtype=dtype)
        found.append(replace(case, work=work))
    return found
