"""Matmuls by experts: weights that are looked up by row are never gathered."""

from __future__ import annotations

import warnings
from itertools import product
from typing import Any

import ml_dtypes  # noqa: F401
import numpy as np
import pytest
import tvm
from tvm import relax, tirx
from tvm.relax import op
from tvm.target import Target

from relax_fusion import make_target
from relax_fusion.dlight_rules.apply import ScheduleKernels
from relax_fusion.dlight_rules.fused import FusedRule
from relax_fusion.errors import Reason
from relax_fusion.passes import FuseExperts, FuseOptions, FusePatterns, FuseRMSNormMatmul, fuse
from relax_fusion.report.decision import Decision
from relax_fusion.workload.expert_load import ExpertLoad

from ..support.quantised import Groups
from ..support.quick import machine, quick_host, quickly
from ..support.slow import quick_if

EXPERTS, CHOSEN, WIDTH, INNER = 4, 2, 48, 40


class Layer:
    """A function of rows, the experts of each and their shares, that grows call by call."""

    def __init__(self, dtype: str = "float32", tokens: Any = 5, mode: str = "fast") -> None:
        self.builder, self.mode = relax.BlockBuilder(), mode
        self.x = relax.Var("x", relax.TensorType([tokens, WIDTH], dtype))
        self.ids = relax.Var("ids", relax.TensorType([tokens, CHOSEN], "int64"))
        self.share = relax.Var("share", relax.TensorType([tokens, CHOSEN], dtype))
        self.params, self.dtype, self.rows = [self.x, self.ids, self.share], dtype, tokens * CHOSEN
        self.tokens = tokens

    def param(self, *shape: int) -> relax.Var:
        """Add a parameter."""
        var = relax.Var(f"w{len(self.params)}", relax.TensorType(shape, self.dtype))
        self.params.append(var)
        return var

    def packed(self, form: Groups, rows: int, k: int) -> relax.Var:
        """Return the weights of all experts, as words and scales are decoded to them."""
        given = []
        for shape, dtype in form.shapes(EXPERTS * rows, k):
            given.append(relax.Var(f"w{len(self.params)}", relax.TensorType(shape, dtype)))
            self.params.append(given[-1])
        whole = form.emit(self.builder, given, EXPERTS * rows, k)
        return self.emit(op.reshape(whole, [EXPERTS, rows, k]))

    def look_up(self, table: relax.Var) -> relax.Var:
        """Return the matrix or the row of each row's expert."""
        flat = self.emit(op.reshape(self.ids, [self.rows]))
        return self.emit(op.take(table, flat, axis=0, mode=self.mode))

    def emit(self, value: relax.Expr) -> relax.Var:
        """Add a binding."""
        return self.builder.emit(value)

    def linear(self, x: relax.Var, layout: str, inner: int, outer: int, bias: bool) -> relax.Var:
        """Multiply rows by the weights of their experts."""
        shape = (EXPERTS, outer, inner) if layout == "nk" else (EXPERTS, inner, outer)
        weight = self.look_up(self.param(*shape))
        column = self.emit(op.expand_dims(x, -1 if layout == "nk" else 1))
        operands = (weight, column) if layout == "nk" else (column, weight)
        y = self.emit(op.squeeze(self.emit(op.matmul(*operands)), [-1 if layout == "nk" else 1]))
        return self.emit(op.add(y, self.look_up(self.param(EXPERTS, outer)))) if bias else y

    def repeated(self) -> relax.Var:
        """Return each row as often as it has experts."""
        wide = op.broadcast_to(op.expand_dims(self.x, 1), [self.tokens, CHOSEN, WIDTH])
        return self.emit(op.reshape(wide, [self.rows, WIDTH]))

    def total(self, y: relax.Var) -> relax.Var:
        """Weigh rows, and add those of a token."""
        share = op.expand_dims(op.reshape(self.share, [self.rows]), -1)
        weighed = self.emit(op.multiply(y, share))
        wide = op.reshape(weighed, [self.tokens, CHOSEN, WIDTH])
        return self.emit(op.add(self.x, op.sum(wide, axis=[1])))


def gated(layer: Layer, layout: str, gate: str, bias: bool) -> relax.Var:
    """Write a whole feed-forward network of experts."""
    columns = INNER if gate == "one" else 2 * INNER
    y = layer.linear(layer.repeated(), layout, WIDTH, columns, bias)
    if gate == "halves":
        halves = layer.emit(op.split(y, 2, axis=-1))
        h = op.multiply(op.nn.silu(halves[0]), halves[1])
    elif gate == "pairs":
        gates = op.clip(op.strided_slice(y, [1], [0], [2 * INNER], [2]), -9e9, 1.0)
        ups = op.clip(op.strided_slice(y, [1], [1], [2 * INNER], [2]), -1.0, 1.0)
        narrow = op.multiply(gates, op.sigmoid(op.multiply(gates, relax.const(1.7, layer.dtype))))
        h = op.multiply(op.add(ups, relax.const(1.0, layer.dtype)), narrow)
    else:
        h = op.nn.gelu(y)
    return layer.total(layer.linear(layer.emit(h), layout, INNER, WIDTH, bias))


def module(layer: Layer, make: Any, *how: Any) -> tvm.IRModule:
    """Return the module of a layer."""
    blocks = layer.builder
    with blocks.function("main"):
        with blocks.dataflow():
            result = blocks.emit_output(make(layer, *how))
        blocks.emit_func_output(result, layer.params)
    return relax.transform.CanonicalizeBindings()(blocks.get())


def arguments(mod: tvm.IRModule, tokens: int = 5, wild: bool = False) -> list[np.ndarray]:
    """Return random operands; with `wild`, experts that there are none of."""
    random = np.random.default_rng(0)
    found = []
    for param in mod["main"].params:
        shape = [int(d) if isinstance(d, tirx.IntImm) else tokens for d in param.ty.shape]
        if str(param.ty.dtype) == "uint32":
            found.append(random.integers(0, 2**32, shape, "uint32"))
        elif str(param.ty.dtype) == "int64":
            least, most = (-2, EXPERTS + 2) if wild else (0, EXPERTS)
            found.append(random.integers(least, most, shape))
        else:
            made = random.standard_normal(shape) / (np.sqrt(shape[-1]) if len(shape) > 2 else 1)
            found.append(made.astype(str(param.ty.dtype)))
    return found


def run(mod: tvm.IRModule, args: list[np.ndarray]) -> np.ndarray:
    """Return what a module computes."""
    main = machine(quickly(mod))["main"]
    return main(*map(tvm.runtime.tensor, args)).numpy().astype("float64")


def fused(mod: tvm.IRModule, target: Target | None = None) -> tvm.IRModule:
    """Return a module after the pass."""
    target = target or quick_host()
    after = FuseExperts(FuseOptions(target, validate="strict"))(mod)
    after = ScheduleKernels(target, [FusedRule()], None)(after)
    relax.analysis.well_formed(after)
    return after


def kernels(mod: tvm.IRModule) -> int:
    """Return how many kernels there are, and check that nothing is gathered."""
    return mod["main"].script().count("R.call_tir(")


QUICK = {
    *(("nk", "halves", False, False), ("nk", "pairs", True, True), ("nk", "one", False, True)),
    *(("kn", "halves", True, True), ("kn", "pairs", False, False), ("kn", "one", True, False)),
}
"""Among these are all pairs of values."""


@pytest.mark.parametrize(
    ("layout", "gate", "bias", "dynamic"),
    quick_if(
        QUICK.__contains__,
        product(("nk", "kn"), ("halves", "pairs", "one"), (False, True), (False, True)),
    ),
)
def test_a_layer_is_two_kernels(layout: str, gate: str, bias: bool, dynamic: bool) -> None:
    tokens = tirx.Var("n", "int64") if dynamic else 5
    mod = module(Layer(tokens=tokens), gated, layout, gate, bias)
    after = fused(mod)
    assert kernels(after) == 2
    text = after["main"].script()
    assert not any(name in text for name in ("R.take", "R.split", "R.strided_slice", "R.multiply"))
    args = arguments(mod, 3 if dynamic else 5)
    wanted = run(mod, args)
    assert np.abs(run(after, args) - wanted).max() < 1e-5 * np.abs(wanted).max()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_halves_are_no_less_exact(dtype: str) -> None:
    mod = module(Layer(dtype), gated, "nk", "halves", False)
    exact = module(Layer("float32"), gated, "nk", "halves", False)
    args = arguments(mod)
    wanted = run(exact, [a if a.dtype == "int64" else a.astype("float32") for a in args])
    errors = [np.abs(run(m, args) - wanted).max() for m in (fused(mod), mod)]
    assert kernels(fused(mod)) == 2
    assert errors[0] < 1.2 * errors[1]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dynamic", [False, True])
def test_packed_weights_are_read_as_words(bits: int, dynamic: bool) -> None:
    def make(layer: Layer) -> relax.Expr:
        weight = layer.look_up(layer.packed(Groups(bits, 16, "float32"), 2 * INNER, WIDTH))
        column = layer.emit(op.expand_dims(layer.repeated(), -1))
        halves = layer.emit(op.split(op.squeeze(op.matmul(weight, column), [-1]), 2, axis=-1))
        return op.multiply(op.nn.silu(halves[0]), halves[1])

    mod = module(Layer(tokens=tirx.Var("n", "int64") if dynamic else 5), make)
    after, args = fused(mod), arguments(mod)
    text = after["main"].script()
    assert kernels(after) == 1 and "decode" not in text, "the kernel alone, of words"
    wanted = run(mod, args)
    assert np.abs(run(after, args) - wanted).max() < 1e-5 * np.abs(wanted).max()


def test_weights_of_no_format_are_not_decoded_for_all_experts() -> None:
    def make(layer: Layer) -> relax.Expr:
        layer.params.append(relax.Var("q", relax.TensorType((EXPERTS, INNER, WIDTH), "int8")))
        decoded = layer.emit(op.astype(layer.params[-1], "float32"))
        scaled = layer.emit(op.multiply(decoded, layer.param(EXPERTS, INNER, 1)))
        column = layer.emit(op.expand_dims(layer.repeated(), -1))
        return op.squeeze(op.matmul(layer.look_up(scaled), column), [-1])

    decisions: list[Decision] = []
    FuseExperts(FuseOptions(quick_host(), decisions=decisions))(module(Layer(), make))
    (told,) = decisions
    assert told.decline is not None and told.decline.reason == Reason.MATERIALISED


@pytest.mark.parametrize("layout", ["nk", "kn"])
def test_rows_of_one_element(layout: str) -> None:
    def make(layer: Layer) -> relax.Expr:
        rows = layer.emit(op.reshape(layer.share, [layer.rows, 1]))
        return op.nn.relu(layer.linear(rows, layout, 1, INNER, False))

    mod = module(Layer(), make)
    args = arguments(mod)
    after = fused(mod)
    assert kernels(after) == 1
    np.testing.assert_allclose(run(after, args), run(mod, args), atol=1e-6)


def test_numbers_of_no_expert_are_clipped() -> None:
    mod = module(Layer(mode="clip"), gated, "nk", "halves", True)
    args = arguments(mod, wild=True)
    wanted = run(mod, args)
    assert kernels(fused(mod)) == 2
    assert np.abs(run(fused(mod), args) - wanted).max() < 1e-5 * np.abs(wanted).max()


def test_numbers_that_wrap_around_are_left() -> None:
    mod = module(Layer(mode="wrap"), gated, "nk", "halves", False)
    assert kernels(fused(mod)) == 0


def test_a_product_that_is_read_twice_stays_a_tensor() -> None:
    def twice(layer: Layer) -> relax.Var:
        y = layer.linear(layer.repeated(), "nk", WIDTH, INNER, False)
        return layer.emit(op.sum(op.add(op.nn.silu(y), op.cumsum(y, 0)), axis=[0]))

    mod = module(Layer(), twice)
    after, args = fused(mod), arguments(mod)
    assert kernels(after) == 1, "the matmul alone"
    wanted = run(mod, args)
    assert np.abs(run(after, args) - wanted).max() < 1e-5 * np.abs(wanted).max()


def test_weights_that_are_made_of_others_are_read_as_they_are() -> None:
    def added(layer: Layer) -> relax.Var:
        weight = layer.emit(op.add(layer.param(EXPERTS, INNER, WIDTH), relax.const(0.5)))
        rows = layer.emit(op.expand_dims(layer.repeated(), -1))
        return layer.emit(op.squeeze(op.matmul(layer.look_up(weight), rows), [-1]))

    mod = module(Layer(), added)
    after, args = fused(mod), arguments(mod)
    wanted = run(mod, args)
    assert np.abs(run(after, args) - wanted).max() < 1e-5 * np.abs(wanted).max()


def test_the_sum_takes_the_residual_and_not_the_norm_behind() -> None:
    def normed(layer: Layer) -> relax.Var:
        y = layer.emit(gated(layer, "nk", "halves", False))
        norm = layer.emit(op.nn.rms_norm(y, layer.param(WIDTH), axes=[-1]))
        weight = op.permute_dims(layer.param(INNER, WIDTH))
        return layer.emit(op.matmul(norm, weight))

    decisions: list[Decision] = []
    options = FuseOptions(make_target("h200"), always_fuse=True, decisions=decisions)
    passes = [FuseExperts(options), FuseRMSNormMatmul(options)]
    fuse(module(Layer("float16"), normed), passes, options)
    made = [d.spelling for d in decisions if d.fused]
    assert made == ["experts gate silu", "experts sum residual", "rms_norm matmul NT"]


@pytest.mark.parametrize("layout", ["nk", "kn"])
def test_gpus_have_one_kernel_for_each(layout: str) -> None:
    target = make_target("h200")
    tokens = tirx.Var("n", "int64")
    mod = fused(module(Layer("float16", tokens), gated, layout, "halves", True), target)
    assert kernels(mod) == 2
    for _, func in mod.functions_items():
        if isinstance(func, tirx.PrimFunc):
            text = func.script()
            assert text.count('thread="blockIdx.x"') == text.count('thread="threadIdx.x"') > 0
            tvm.tirx.build(func.with_attr("global_symbol", "main"), target)


def test_counts_of_other_layers_are_told() -> None:
    mod = module(Layer(), gated, "nk", "one", False)
    decisions: list[Decision] = []
    fitting, other = ExpertLoad(CHOSEN, ((3, 1, 0, 2),)), ExpertLoad(1, ((3, 1, 0),))
    with warnings.catch_warnings(action="error"):
        FusePatterns(FuseOptions(quick_host(), expert_load=fitting, decisions=decisions))(mod)
    assert any(getattr(d.workload, "skew", 0) > 0 for d in decisions)
    told = "counts rows of 3 experts, 1 for a row; nothing is chosen by it: layers have "
    for where, found in ((mod, "4 experts, 2 for a row"), (tvm.IRModule(), "no experts")):
        with pytest.warns(RuntimeWarning, match=told + found):
            FusePatterns(FuseOptions(quick_host(), expert_load=other))(where)
