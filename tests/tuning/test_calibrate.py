"""Measuring the rates of a device: what is fitted, kept, gone on with, and refused."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tvm

from relax_fusion import make_target
from relax_fusion.cli import main
from relax_fusion.errors import TargetError, TuningError
from relax_fusion.estimator import predict
from relax_fusion.estimator.database import target_fields
from relax_fusion.estimator.tile_plan import PlanTable
from relax_fusion.hardware import DEVICES, DeviceSpec, device
from relax_fusion.hardware.device_file import DeviceFile, Rate, Timed, read_device_file
from relax_fusion.hardware.target import device_of
from relax_fusion.tuning import calibrate, rates, sweep
from relax_fusion.tuning.device import compiled
from relax_fusion.tuning.probes import Probe, named, probes
from relax_fusion.tuning.rates import LAUNCHES, fitted
from relax_fusion.tuning.sweep import Sweep

from ..support.quick import quick_host, quick_passes

FEW = tuple(named((rows, 64, 64), "float32") for rows in (1, 4, 16))
CPU_FIELDS = ("clock_hz", "dram_bytes_per_s", "launch_s")
GPU_FIELDS = (
    *("dram_bytes_per_s", "clock_hz", "launch_s"),
    *("tensor_float16_flops_per_s", "tensor_tf32_flops_per_s"),
)


@pytest.fixture(scope="module", autouse=True)
def quick_to_compile():
    """Compile without optimisations."""
    made = quick_host()
    with pytest.MonkeyPatch.context() as patch, quick_passes():
        patch.setattr("relax_fusion.hardware.target.host_target", lambda: made)
        patch.setattr(sweep, "ENOUGH_S", 1e-3)
        for module in (rates, sweep):
            patch.setattr(module, "probes", lambda _: iter(FEW))
        yield


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("calibrated") / "mine.json"
    calibrate(path)
    return path


def test_a_file_is_a_target(made: Path) -> None:
    found, target = read_device_file(made), make_target(str(made))
    spec = device_of(target)
    assert {name: rate.value for name, rate in found.rates.items()} == {
        name: getattr(spec, name) for name in found.rates
    }
    assert spec.description.endswith("-core CPU, calibrated") and spec.measured
    assert found.rates["launch_s"].source == "measured"
    assert found.rates["l2_bytes_per_s"] == Rate(
        device_of(make_target("llvm")).l2_bytes_per_s, "assumed"
    )
    assert [timed.probe for timed in found.times] == [probe.name for probe in FEW]
    assert all(timed.predicted_s > 0 for timed in found.times) and not found.left
    assert target_fields(str(target)) == target_fields(str(make_target("llvm")))  # of databases
    fewer = make_target({**target_fields(str(target)), "model": spec.name, "num-cores": 77})
    assert device_of(fewer).label == "77-core CPU"


def test_a_second_run_measures_nothing(made: Path, tmp_path: Path) -> None:
    path, told = tmp_path / "again.json", list[str]()
    path.write_bytes(made.read_bytes())
    assert calibrate(path, str(made), progress=told.append) == read_device_file(made)
    assert told == [] and path.read_bytes() == made.read_bytes()
    calibrate(path, again=True, progress=told.append)
    assert len(told) == len(FEW)


def test_an_interrupted_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, own, count = tmp_path / "mine.json", Sweep.seconds, [0]

    def interrupted(self: Sweep, *args: Any) -> float:
        count[0] += 1
        if count[0] == 3:
            raise KeyboardInterrupt
        return own(self, *args)

    monkeypatch.setattr(Sweep, "seconds", interrupted)
    with pytest.raises(KeyboardInterrupt):
        calibrate(path)
    kept = read_device_file(path)
    assert len(kept.times) == 2 and device_of(make_target(str(path))).measured
    found = calibrate(path)
    assert count[0] == 4 and [t.seconds for t in found.times[:2]] == [t.seconds for t in kept.times]


def test_what_fails_is_left_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: Sweep, probe: Probe, *args: Any) -> float:
        if probe is FEW[0]:
            raise RuntimeError("out of memory\nand more")
        return 1e-5

    monkeypatch.setattr(Sweep, "seconds", fails)
    found = calibrate(tmp_path / "mine.json")
    assert found.left == (f"{FEW[0].name}: RuntimeError: out of memory",)
    with pytest.raises(TuningError, match=r"nothing was measured; .*: there was no time for it"):
        calibrate(tmp_path / "none.json", seconds=0)
    assert not (tmp_path / "none.json").exists()
    with pytest.raises(FileNotFoundError, match=r"nowhere/mine\.json"):
        calibrate(tmp_path / "nowhere" / "mine.json")


def synthetic(base: DeviceSpec, real: DeviceSpec, call_s: float) -> DeviceFile:
    """Return what a sweep over a device would find, if all prices were right."""

    def timed(probe: Probe) -> Timed:
        plan = probe.plan(base)
        assert not isinstance(plan, str)
        return Timed(probe.name, plan.key, call_s + rates.alone_s(probe, plan, real), 0.0)

    times = [timed(probe) for probe in probes(base)]
    if base.kind == "gpu":
        times.insert(0, Timed(LAUNCHES, "", real.launch_s, 0.0))
    names = (*rates.RATES[base.kind], *rates.ALIKE[base.kind])
    before = {n: Rate(getattr(base, n), "from data sheet") for n in names if getattr(base, n)}
    return DeviceFile("mine", base.name, {}, "", {}, {"sm_count": base.sm_count}, before, (*times,))


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("cpu", CPU_FIELDS),
        ("h200", GPU_FIELDS),
        ("rtx4090", GPU_FIELDS),
        ("a100", GPU_FIELDS[:1]),  # L2 feeds its tensor cores slower than they multiply
    ],
)
def test_rates_are_found_again(
    name: str, fields: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rates, "probes", probes)
    base, factors = device(name), (0.7, 1.2, 0.8, 1.3, 1.3)
    changed = {n: getattr(base, n) * f for n, f in zip(fields, factors, strict=False)}
    real = replace(base, **changed)
    found = fitted(synthetic(base, real, 9e-6), base)
    for field, value in changed.items():
        assert found.rates[field].source == "measured", field
        assert found.rates[field].value == pytest.approx(value, rel=0.12), field
    errors = [math.log(t.predicted_s / t.seconds) for t in found.times]
    assert max(map(abs, errors)) < 0.1
    assert {r.source for r in found.rates.values()} <= {"measured", "from data sheet"}
    assert DEVICES.get(found.spec.name) is None and found.spec.sm_count == base.sm_count


@pytest.mark.parametrize("name", ["h200", "a100"])
def test_kernels_for_gpus_compile_and_launches_are_one_graph(name: str) -> None:
    target, seen = make_target(name), list[str]()
    dev = device_of(target)
    for probe in probes(dev):
        plan = probe.plan(dev)
        assert not isinstance(plan, str), plan
        if probe.rows in (1, 256, 512):
            with tvm.transform.PassContext():
                assert compiled(probe.work, {plan: PlanTable.single(plan)}, target)[1] == {}
    device = SimpleNamespace(
        on_gpu=True,
        load=lambda made: seen.append(made.as_text()),
        tensor=lambda value: value,
        warm_up=lambda *_: None,
        sample=lambda *given, flush: [1e-6 * len(seen[-1].split("add "))] * given[-1],
    )
    found = Sweep(target, dev, device).launch_s()  # type: ignore[arg-type]
    assert "cuda_graph.run_or_capture" in seen[0] and found == pytest.approx(1e-6 + sweep.ALONE_S)


def changed(**fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda record: record.update(fields)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (changed(base="tpu"), r"bad\.json: base is 'tpu', must be of .*h200"),
        (changed(base="cpu@0"), "base is 'cpu@0', must be of [^@]*$"),
        (changed(target={"kind": "cuda", "arch": "sm_90a"}), "kind 'cuda', must be 'llvm' as base"),
        (changed(base="h200"), "a device of kind gpu has no number 'vector_bytes'"),
        (changed(base="h200", numbers={}), "its target is of kind 'llvm', must be 'cuda' as base"),
        (changed(numbers={"warp_size": 7}), "a device of kind cpu has no number 'warp_size'"),
        (changed(rates={"speed": {"value": 1.0, "source": "measured"}}), "no number 'speed'"),
        (
            changed(rates={"clock_hz": {"value": -1.0, "source": "assumed"}}),
            r"bad\.json: .*clock_hz is -1",
        ),
        (changed(rates={"clock_hz": {"value": 1.0, "source": "guessed"}}), "source.* is 'guessed'"),
        (changed(numbers={"sm_count": 0}), "cores|sm_count"),
        (changed(numbers={"sm_count": 2.5}), "sm_count.* is 2.5"),
        (changed(target={"kind": "nothing"}), "target"),
        (changed(more=1), "no field 'more'"),
        (lambda record: record.pop("label"), "the field 'label' is missing"),
    ],
)
def test_a_file_that_is_damaged(
    change: Callable[[dict[str, Any]], Any], message: str, made: Path, tmp_path: Path
) -> None:
    record, path = json.loads(made.read_text()), tmp_path / "bad.json"
    change(record)
    path.write_text(json.dumps(record))
    with pytest.raises(TargetError, match=message):
        device_of(make_target(str(path)))


def test_files_that_are_none(tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    for name in (str(path), "a\0.json"):
        with pytest.raises(TargetError, match="cannot be read"):
            make_target(name)
    for text in ("", "[1]", '{"format": 2}', "\0"):
        path.write_text(text)
        with pytest.raises(TargetError, match="device file"):
            calibrate(path)
        assert path.read_text() == text


def test_a_file_of_another_device_stays(made: Path, tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    replace(read_device_file(made), machine="another").write(path)
    before = path.read_bytes()
    with pytest.raises(TargetError, match=r"its machine is 'another', here it is .*another file"):
        calibrate(path)
    assert path.read_bytes() == before


def test_the_command(
    made: Path, tmp_path: Path, capfd: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "mine.json"
    path.write_bytes(made.read_bytes())
    assert main(["calibrate", "-o", str(path)]) == 0
    out = capfd.readouterr().out
    assert (
        "launch_s" in out and "measured" in out and "assumed" in out and f"--target {path}" in out
    )
    assert main(["calibrate", "-o", str(path), "--json", "-q"]) == 0
    record = json.loads(capfd.readouterr().out)
    assert record["rates"]["launch_s"]["source"] == "measured" and record["name"].startswith("cpu@")
    for words, code, message in (
        (["-o", "mine.txt"], 2, "must end in .json"),
        (["-o", str(path), "--device", "cuda"], 1, "target cuda: no such device on this machine"),
        (
            ["-o", str(path), "--target", "h200", "--device", "cpu"],
            1,
            "'cpu', but the target is of kind cuda",
        ),
        (["-o", str(path), "--target", "m1"], 1, "only CPUs (llvm) and cuda are calibrated"),
        (["-o", str(tmp_path / "none" / "x.json"), "--seconds", "1"], 2, "a directory that exists"),
    ):
        if "cuda" in message and tvm.cuda().exist:
            continue
        assert main(["calibrate", *words]) == code
        assert message in capfd.readouterr().err
    assert main(["explain", "demo-llama", "--target", str(path), "-q"]) == 0
    assert "-core CPU, calibrated:" in capfd.readouterr().out


def test_prices_go_by_the_file(made: Path) -> None:
    record, probe = read_device_file(made), FEW[2]
    slow = {**record.rates, "launch_s": Rate(1.0, "measured")}
    plan = probe.plan(record.spec)
    assert not isinstance(plan, str)
    assert predict(probe.work, plan, replace(record, rates=slow).spec, 16).seconds > 1
