"""Attention workloads with inputs and a float64 reference, for any target.

`cases()` lists them, `Case.check` judges a result; neither needs a GPU or TVM.  The CPU tests run
all of them, and a machine with a GPU runs the same ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import ml_dtypes
import numpy as np

from relax_fusion.workload import Attention, DynamicDim

Arrays = dict[str, np.ndarray]
Edit = Callable[[Arrays], None]


def numpy_dtype(name: str) -> np.dtype:
    """Return the numpy type called `name`, bfloat16 included."""
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


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

    def inputs(self) -> Arrays:
        """Return q, k, v and, where there is one, bias, in layout and dtype of the workload."""
        work, rng = self.work, np.random.default_rng(7)
        batch, q_len, kv_len = self.lengths
        stored = self.sizes["kv_capacity"] if work.kv_prefix else kv_len

        def tensor(layout: str, s: int, n: int, h: int, scale: float = 1.0) -> np.ndarray:
            shape = [{"b": batch, "s": s, "n": n, "h": h}[letter] for letter in layout]
            return (rng.standard_normal(shape) * scale).astype(numpy_dtype(work.dtype))

        arrays = {
            "q": tensor(work.q_layout, q_len, work.q_heads, work.head_dim, self.magnitude),
            "k": tensor(work.kv_layout, stored, work.kv_heads, work.head_dim, self.magnitude),
            "v": tensor(work.kv_layout, stored, work.kv_heads, work.v_dim),
        }
        if work.kv_prefix:
            axis = work.kv_layout.index("s")
            for name in ("k", "v"):
                np.moveaxis(arrays[name], axis, 0)[kv_len:] = np.nan
        if work.bias_dims:
            full = (batch, work.q_heads, q_len, kv_len)
            shape = [n if has else 1 for n, has in zip(full, work.bias_dims, strict=True)]
            arrays["bias"] = rng.standard_normal(shape).astype(numpy_dtype(work.bias_dtype))
        if self.edit is not None:
            self.edit(arrays)
        return arrays

    def out_shape(self) -> tuple[int, ...]:
        """Return the shape of the result."""
        batch, q_len, _ = self.lengths
        sizes = {"b": batch, "s": q_len, "n": self.work.q_heads, "h": self.work.v_dim}
        return tuple(sizes[letter] for letter in self.work.out_layout)

    def visible(self) -> np.ndarray:
        """Return which key (column) each query (row) sees."""
        _, q_len, kv_len = self.lengths
        shift = kv_len - q_len if self.work.causal == "bottom_right" else 0
        if self.work.causal == "none":
            return np.ones((q_len, kv_len), bool)
        return np.arange(kv_len)[None] <= np.arange(q_len)[:, None] + shift

    def unfused(self, arrays: Arrays, dtype: str) -> np.ndarray:
        """Compute the workload step by step, with every intermediate in `dtype`."""
        work, kv_len = self.work, self.lengths[2]

        def heads_first(name: str, layout: str, limit: int | None = None) -> np.ndarray:
            moved = arrays[name].astype(dtype).transpose([layout.index(x) for x in "bnsh"])
            return moved[:, :, :limit]

        group = work.q_heads // work.kv_heads
        q = heads_first("q", work.q_layout)
        k = np.repeat(heads_first("k", work.kv_layout, kv_len), group, axis=1)
        v = np.repeat(heads_first("v", work.kv_layout, kv_len), group, axis=1)
        scores = q @ k.swapaxes(-1, -2) * np.dtype(dtype).type(work.scale)
        if "bias" in arrays:
            scores = scores + arrays["bias"].astype(dtype)
        scores = np.where(self.visible(), scores, -np.inf)
        top = scores.max(-1, keepdims=True, initial=-np.inf)
        weights = np.exp(scores - np.where(top == -np.inf, 0, top).astype(dtype))
        total = weights.sum(-1, keepdims=True)
        out = weights / np.where(total == 0, 1, total).astype(dtype) @ v
        return out.transpose(["bnsh".index(x) for x in work.out_layout])

    def check(self, arrays: Arrays, got: np.ndarray) -> None:
        """Assert that `got` errs at most twice as much as the unfused float32 steps do.

        One rounding step of the result's dtype, at the size of the largest value, is added.
        """
        exact = self.unfused(arrays, "float64")
        out_dtype = numpy_dtype(self.work.out_dtype)
        plain = self.unfused(arrays, "float32").astype(out_dtype).astype(np.float64)
        got = got.astype(np.float64)
        assert np.array_equal(np.isnan(exact), np.isnan(got)), f"{self.name}: NaN in other places"
        if not got.size or np.isnan(exact).all():
            return
        step = float(ml_dtypes.finfo(out_dtype).eps) * np.nanmax(np.abs(exact))
        allowed = 2 * np.nanmax(np.abs(plain - exact)) + step
        error = np.nanmax(np.abs(got - exact))
        assert error <= allowed, f"{self.name}: error {error:.3g}, allowed {allowed:.3g}"


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
        *(_case(f"head_dim_{d}", head_dim=d, v_dim=d, scale=d**-0.5) for d in (80, 96)),
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


def _numbers() -> list[Case]:
    half = [
        _case(f"{dtype}_to_{out}", dtype=dtype, out_dtype=out, causal="top_left")
        for dtype, out in (
            ("float16", "float16"),
            ("bfloat16", "bfloat16"),
            ("float16", "float32"),
        )
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
    ]


def cases() -> list[Case]:
    """Return all cases; with one plan they compile to as many kernels."""
    return [*_shapes(), *_masks(), *_numbers(), *_dynamic()]
