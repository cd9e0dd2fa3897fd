"""The tuning database: what is read of it, by whom it may be written, and how it can be damaged."""

from __future__ import annotations

import fcntl
import json
import logging
import os
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import asdict, replace
from multiprocessing import get_context
from pathlib import Path

import pytest

from relax_fusion.errors import DatabaseError
from relax_fusion.estimator import AttentionSize, candidates
from relax_fusion.estimator.database import (
    Database,
    Measurement,
    size_to_json,
    target_fields,
    versions_of,
)
from relax_fusion.workload import DynamicDim
from relax_fusion.workload.json import to_json

from ..support.estimator_cases import AVX2, attention, norm_matmul

TARGET = json.dumps({"kind": "llvm", "tag": "", "keys": ["cpu"], "num-cores": 2, "mcpu": "znver4"})
WORK = norm_matmul(DynamicDim("rows"))
PLAN, OTHER = list(candidates(WORK, AVX2))[:2]


def measurement(work=WORK, plan=PLAN, size=16, seconds=1e-3) -> Measurement:
    return Measurement(
        device="2-core CPU",
        target=target_fields(TARGET),
        workload=json.loads(to_json(work)),
        size=size_to_json(size),
        plan=plan.to_attr(),
        seconds=seconds,
        spread=0.01,
        versions={**versions_of(PLAN), "driver": "1"},
    )


@pytest.fixture
def database(tmp_path: Path) -> Database:
    return Database(tmp_path / "times.jsonl")


def test_what_was_added_is_read(database: Database) -> None:
    work = attention(q_len=DynamicDim("n"), kv_len=DynamicDim("n"), batch=1)
    size, plan = AttentionSize(1, 64, 64), next(candidates(work, AVX2))
    database.add(measurement())
    database.add(measurement(plan=OTHER, seconds=2e-3))
    database.add(measurement(work, plan, size, 3e-3))
    found = database.measured(TARGET)
    assert found.of(WORK) == {16: {PLAN: 1e-3, OTHER: 2e-3}}
    assert found.of(work) == {size: {plan: 3e-3}}


def test_the_last_measurement_counts(database: Database) -> None:
    database.add(measurement())
    before = database.measured(TARGET)
    database.add(measurement(seconds=5e-3))
    assert database.measured(TARGET).of(WORK) == {16: {PLAN: 5e-3}}
    assert database.measured(TARGET) == database.measured(TARGET) != before


def test_names_and_bounds_of_sizes_make_no_difference(database: Database) -> None:
    database.add(measurement())
    found = database.measured(TARGET)
    assert found.of(replace(WORK, rows=DynamicDim("tokens", 512)))
    assert not found.of(replace(WORK, rows=16))
    apart = attention(q_len=DynamicDim("n"), kv_len=DynamicDim("m"))
    database.add(measurement(apart, next(candidates(apart, AVX2)), AttentionSize(1, 1, 8)))
    found = database.measured(TARGET)
    assert found.of(attention(q_len=DynamicDim("a"), kv_len=DynamicDim("b")))
    assert not found.of(attention(q_len=DynamicDim("a"), kv_len=DynamicDim("a")))


@pytest.mark.parametrize(
    "changes",
    [
        {"versions": {**versions_of(PLAN), "kernels": "000000000000"}},
        {"versions": {**versions_of(PLAN), "tvm": "0.1"}},
        {"target": {"kind": "llvm", "mcpu": "znver4", "num-cores": 8}},
        {"plan": {**PLAN.to_attr(), "family": "of another package", "depth": 3}},
        {"size": {"batch": 1, "q_len": 1, "kv_len": 1}},
    ],
)
def test_measurements_of_something_else_are_kept_and_not_used(database: Database, changes) -> None:
    database.add(replace(measurement(), **changes))
    text = database.path.read_bytes()
    database.add(measurement(plan=OTHER))
    assert database.measured(TARGET).of(WORK) == {16: {OTHER: 1e-3}}
    assert database.path.read_bytes().startswith(text)


def test_lines_of_another_format_are_passed_over(database: Database) -> None:
    database.path.write_text('{"format": 2, "seconds": "fast"}\n\n')
    database.add(measurement())
    assert database.measured(TARGET).of(WORK) == {16: {PLAN: 1e-3}}


def test_a_host_makes_no_difference() -> None:
    told = {"kind": "cuda", "arch": "sm_90a"}
    hosts = [{"kind": "llvm"}, {"kind": "llvm", "mcpu": "znver4"}]
    found = [target_fields(json.dumps({**told, "host": host})) for host in hosts]
    assert found == [told, told]


DAMAGE = {
    "no": "no JSON",
    '{"format": true}': "must have a format as a number",
    "[1]": "must have a format as a number",
    json.dumps({**asdict(measurement()), "seconds": -1.0}): "seconds is -1.0",
    json.dumps({**asdict(measurement()), "seconds": None}): "'seconds' is missing",
    json.dumps({**asdict(measurement()), "workload": "x"}): "workload is 'x'",
}


@pytest.mark.parametrize("line", DAMAGE)
def test_damage_is_told_with_its_place(database: Database, line: str) -> None:
    database.add(measurement())
    with database.path.open("a") as file:
        file.write(f"{line}\n")
    database.add(measurement())
    text = database.path.read_bytes()
    with pytest.raises(DatabaseError, match=r"times\.jsonl, line 2.*") as caught:
        database.measured(TARGET)
    assert DAMAGE[line] in str(caught.value)
    assert database.path.read_bytes() == text


@pytest.mark.parametrize("length", [1, 5000])
def test_a_line_that_was_cut_off_is_left_out(database: Database, length: int, caplog) -> None:
    database.add(measurement())
    whole = database.path.read_bytes()
    database.path.write_bytes(whole + b'{"format": 1, "machine": "' + b"x" * length)
    with caplog.at_level(logging.WARNING):
        assert database.measured(TARGET).of(WORK) == {16: {PLAN: 1e-3}}
    assert "last line is cut off" in caplog.text
    database.add(measurement(plan=OTHER))
    assert database.path.read_bytes().startswith(whole + b'{"format": 1, "device"')
    assert set(database.measured(TARGET).of(WORK)[16]) == {PLAN, OTHER}


def test_a_last_line_without_its_end_counts(database: Database) -> None:
    database.add(measurement())
    database.path.write_bytes(database.path.read_bytes()[:-1])
    assert database.measured(TARGET).of(WORK) == {16: {PLAN: 1e-3}}
    database.add(measurement(plan=OTHER))
    assert len(database.path.read_text().splitlines()) == 2


def written(path: Path, count: int) -> None:
    """Add measurements, each at a size of its own, as a process of its own does."""
    for n in range(count):
        database, first = Database(path), os.getpid() * 1000
        database.add(measurement(size=first + n, seconds=1e-3))


def test_two_writers_lose_nothing(database: Database) -> None:
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        for done in [pool.submit(written, database.path, 40) for _ in range(2)]:
            done.result()
    assert len(database.measured(TARGET).of(WORK)) in (40, 80)  # one process may do both
    assert len(database.path.read_text().splitlines()) == 80


def test_writers_wait_for_each_other(database: Database) -> None:
    database.add(measurement())
    with database.path.open("ab") as other, ThreadPoolExecutor(1) as pool:
        fcntl.flock(other, fcntl.LOCK_EX)
        waiting = pool.submit(database.add, measurement(plan=OTHER))
        with pytest.raises(TimeoutError):
            waiting.result(timeout=0.2)
        fcntl.flock(other, fcntl.LOCK_UN)
        waiting.result(timeout=60)
    assert set(database.measured(TARGET).of(WORK)[16]) == {PLAN, OTHER}


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(DatabaseError, match=r"none cannot be read \(No such file"):
        Database(tmp_path / "none").measured(TARGET)
    with pytest.raises(DatabaseError, match=r"cannot be written \(it is no regular file"):
        Database(tmp_path).add(measurement())
