"""The memory that a report tells of, ours and TVM's."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import ir, relax
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.target import Target

from relax_fusion import Report
from relax_fusion.inventory.memory import RecordTVMMemory
from relax_fusion.report import Material
from relax_fusion.report.tables import coverage_table

HIDDEN, INNER, ROWS = 32, 96, 64
CPU = Target({"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "haswell", "num-cores": 2})


@I.ir_module
class Layer:
    @R.function
    def main(
        x: R.Tensor(("n", HIDDEN), "float32"),
        up: R.Tensor((INNER, HIDDEN), "float32"),
        down: R.Tensor((HIDDEN, INNER), "float32"),
    ):
        with R.dataflow():
            y = R.nn.relu(R.matmul(x, R.permute_dims(up)))
            z = R.add(x, R.matmul(y, R.permute_dims(down)))
            R.output(z)
        return z


def reported(mod: ir.IRModule, **options: object) -> Report:
    report = Report(material=Material(tvm_memory={}))
    with CPU:
        relax.get_pipeline("relax_fusion", target=CPU, report=report, **options)(mod)
    return report


def test_results_and_what_is_between_them_count_at_the_sizes_of_the_report() -> None:
    (launches,) = reported(Layer).launches
    assert dict(launches.symbols) == {"n": ROWS}
    result, between, turned = 4 * ROWS * HIDDEN, 4 * ROWS * INNER, 4 * INNER * HIDDEN
    assert launches.memory == result  # one kernel computes all
    assert launches.tvm_memory == result + between + turned, "a turned weight lends its memory"


def test_what_is_between_kernels_counts() -> None:
    (launches,) = reported(Layer, disable=("FuseChains",)).launches
    assert launches.memory == 4 * ROWS * (HIDDEN + INNER)


def test_bounds_are_the_sizes() -> None:
    apart = {"disable": ("FuseChains",)}  # which kernels there are may depend on the bound
    (less, more) = (reported(Layer, variable_bounds={"n": n}, **apart).launches[0] for n in (8, 16))
    assert less.memory is not None and more.memory == 2 * less.memory


def test_tvm_plans_only_where_it_is_asked_to() -> None:
    report = Report()
    with CPU:
        relax.get_pipeline("relax_fusion", target=CPU, report=report)(Layer)
    (launches,) = report.launches
    assert launches.memory and launches.tvm_memory is None


def test_it_is_in_the_table_and_in_the_record() -> None:
    report = reported(Layer)
    (launches,) = report.launches
    (_, row) = coverage_table(report.coverage).rows
    assert {f"{launches.memory:,}", f"{launches.tvm_memory:,}"} < set(row)
    assert f'"memory_bytes": {launches.memory}' in report.to_json()


def test_of_constant_weights_tvm_computes_some_before() -> None:
    rng = np.random.default_rng(0)
    shapes = {"up": (INNER, HIDDEN), "down": (HIDDEN, INNER)}
    weights = {n: rng.standard_normal(s).astype("float32") for n, s in shapes.items()}
    (launches,) = reported(relax.transform.BindParams("main", weights)(Layer)).launches
    assert launches.memory and launches.tvm_memory is None


def test_what_tvm_cannot_lower_has_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise ValueError("no")

    monkeypatch.setattr(relax.transform, "FuseTIR", refused)
    found: dict[str, int] = {}
    RecordTVMMemory(found, {})(Layer)
    assert not found
