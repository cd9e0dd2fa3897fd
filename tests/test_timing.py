"""Turns, percentiles, and the times of single kernels."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

from relax_fusion.timing import Times, in_turn, kernel_times
from tests.support.gpu import gpu_target, needs_gpu
from tests.support.quick import machine


def test_contenders_take_turns_until_they_are_told_not_to():
    order, kept = [], {}

    def timer(who):
        return lambda number: order.append((who, number)) or [float(number)]

    found = in_turn(
        {"a": timer("a"), "b": timer("b")},
        3,
        again=lambda who, so_far: who == "a" or len(so_far["b"]) < 2,
        found=kept,
    )
    assert order == [("a", 0), ("b", 0), ("a", 1), ("b", 1), ("a", 2)]
    assert found == kept == {"a": [0.0, 1.0, 2.0], "b": [0.0, 1.0]}


def test_what_was_timed_before_an_error_is_kept():
    def fail(_):
        raise RuntimeError

    kept = {}
    with pytest.raises(RuntimeError):
        in_turn({"a": lambda _: [1.0], "b": fail}, 2, found=kept)
    assert kept == {"a": [1.0], "b": []}


def test_percentiles_are_those_of_numpy():
    times = Times(tuple(n / 10 for n in range(11)))
    record = times.to_record()
    assert (times.median, record["p90_s"], record["count"]) == (0.5, pytest.approx(0.9), 11)
    assert record["min_s"] == 0.0 and record["seconds"][-1] == 1.0


@I.ir_module
class TwoKernels:
    @R.function
    def main(x: R.Tensor((4096,), "float32")) -> R.Tensor((4096,), "float32"):
        with R.dataflow():
            y = R.exp(x)
            z = R.cumsum(y, axis=0)
            R.output(z)
        return z


def test_kernels_are_timed_one_by_one_and_nothing_else():
    made = machine(tvm.compile(relax.transform.LegalizeOps()(TwoKernels), "llvm"))
    x = tvm.runtime.tensor(np.zeros(4096, "float32"))
    found = kernel_times(made, lambda: made["main"](x), tvm.cpu(), 3)
    assert {each.name for each in found} == {"tir_exp", "cumsum"}
    assert all(each.count == 1 and len(each.times.seconds) == 3 for each in found)
    assert found[0].seconds >= found[1].seconds > 0
    made["main"](x)
    assert all(len(each.times.seconds) == 3 for each in found), "the instrument is gone"


@needs_gpu
@pytest.mark.gpu
def test_kernels_on_a_gpu_are_timed_without_their_launch():
    """A kernel that does next to nothing takes no 5 us, which a launch and a wait do."""
    target = gpu_target()
    made = relax.VirtualMachine(tvm.compile(TwoKernels, target), tvm.cuda())
    x = tvm.runtime.tensor(np.zeros(4096, "float32"), tvm.cuda())
    found = kernel_times(made, lambda: made["main"](x), tvm.cuda(), 20)
    (exp,) = (each for each in found if "exp" in each.name)
    assert min(exp.times.seconds) < 5e-6
