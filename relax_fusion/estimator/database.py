"""The tuning database: a file of measured times, which every writer only appends to.

A line is one measurement, as JSON::

    {"format": 1, "device": "2-core CPU", "target": {...}, "workload": {...}, "size": 16,
     "plan": {...}, "seconds": 1.2e-05, "spread": 0.02, "versions": {...}, "machine": "", ...}

Measurements of other kernels, or on another device, stay where they are and are not looked at.  Of
several of one plan at one size, the last counts.  Writers take turns by a lock on the file.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic

from ..errors import DatabaseError, TilePlanError
from ..files import locked, read_file
from ..validation import check, read, shown
from ..workload import Attention, Workload
from ..workload.json import to_json
from .registry import is_launched, plan_of
from .shape import AttentionSize, Size
from .tile_plan import TilePlan

FORMAT = 1
"""Version of a line.  Lines of others are kept, and not looked at."""

_BEGIN = b'{"format": '
"""How lines begin."""

_LONGEST = 2**20
"""Bytes of a line: a measurement has some hundreds."""

_KERNELS = {
    "scheduled": ("compute", "dlight_rules"),
    "launched": (
        *("triton_bridge", "cuda_kernels", "launch", "tiling"),
        *("estimator/families/generated", "estimator/families/cuda_matmul"),
    ),
}
_SOURCES = (".py", ".cu", ".h")
_PACKAGES = {
    "scheduled": {"tvm": "apache-tvm"},
    "launched": {"tvm": "apache-tvm", "triton": "triton"},
}
_LOG = logging.getLogger(__name__)

Positive = Annotated[float, pydantic.Field(gt=0)]

Times = Mapping[Size, Mapping[TilePlan, float]]
"""Seconds of plans, by the size at which they were measured."""


@dataclass(frozen=True)
class Measured:
    """What was measured on one device, by kernels of these versions, by `workload_key`.

    Two are equal if they were made of the same measurements.
    """

    digest: str
    times: Mapping[str, Times] = field(compare=False, repr=False)

    def of(self, work: Workload) -> Times:
        """Return the times of plans of `work`; none where nothing was measured."""
        return self.times.get(workload_key(json.loads(to_json(work))), {})


def workload_key(fields: Mapping[str, Any]) -> str:
    """Return a text that is the same for workloads, as JSON, of the same kernels.

    How a module calls its dynamic dimensions, and how large they may become, makes no difference.
    """
    names: dict[str, str] = {}

    def plain(value: Any) -> Any:
        if isinstance(value, dict) and set(value) == {"name", "upper"}:
            return {"dim": names.setdefault(value["name"], str(len(names)))}
        if isinstance(value, dict):
            return {name: plain(value[name]) for name in sorted(value)}
        return [plain(item) for item in value] if isinstance(value, list) else value

    return json.dumps(plain(dict(fields)))


def size_to_json(size: Size) -> int | dict[str, int]:
    """Return a size as a file has it: rows, or the sizes of an attention by name."""
    return size if isinstance(size, int) else size._asdict()


def size_from_json(size: int | Mapping[str, int]) -> Size | None:
    """Return what `size_to_json` was given; None if it is no such size."""
    if isinstance(size, int):
        return size
    if set(size) != set(AttentionSize._fields):
        return None
    return AttentionSize(**size)


@dataclass(frozen=True)
class Measurement:
    """A line of the database.

    `device`: label of the device, for people.
    `target`: what was compiled for, without its host: `target_fields`.
    `workload`, `plan`: as `relax_fusion.workload.json.to_json` and `TilePlan.to_attr` write them.
    `size`: rows, or sizes by name, of what was measured.
    `seconds`, `spread`: median of the samples, and half of the distance between their quartiles as
    a part of it.
    `versions`: `versions_of` the plan, and of what makes no difference.
    `machine`: what the device says it is, for people.
    `library`: version of this package, for people.
    """

    device: str
    target: dict[str, Any]
    workload: dict[str, Any]
    size: int | dict[str, int]
    plan: dict[str, Any]
    seconds: Positive
    spread: float
    versions: dict[str, str]
    machine: str = ""
    library: str = ""
    format: Literal[1] = 1

    def __post_init__(self) -> None:
        check(self, DatabaseError, "measurement")


def versions_of(plan: TilePlan) -> Mapping[str, str]:
    """Return what a kernel's time depends on: the code that makes it, and the compilers.

    ``kernels`` is a digest of the sources of scheduled kernels, or of launched ones.  Kernels of
    families of other packages are not in it: who changes one has to measure again.
    """
    return _versions("launched" if is_launched(plan) else "scheduled")


@cache
def _versions(made: str) -> Mapping[str, str]:
    root = Path(__file__).parents[1]
    digest = hashlib.sha1()
    for folder in _KERNELS[made]:
        for path in sorted(p for p in (root / folder).rglob("*.*") if p.suffix in _SOURCES):
            digest.update(str(path.relative_to(root)).encode() + path.read_bytes())
    packages = {name: package_version(package) for name, package in _PACKAGES[made].items()}
    return {"kernels": digest.hexdigest()[:12], **packages}


def package_version(package: str) -> str:
    """Return the version of an installed package."""
    try:
        return version(package)
    except PackageNotFoundError:  # built from source, it has no such distribution
        return "from source"


def target_fields(target: str) -> dict[str, Any]:
    """Return what a target, given as JSON (``str(target)``), says of its device.

    A calibration (the model ``"h200@1a2b3c4d"``) changes prices, and no times.
    """
    told = json.loads(target)
    base = str(told.pop("model", "")).partition("@")[0]
    told |= {"model": base} if base not in ("", "cpu") else {}
    return {name: told[name] for name in sorted(told) if name not in ("host", "keys", "tag")}


@dataclass(frozen=True)
class Database:
    """A file of measurements."""

    path: Path  # made by `create`, or by the first measurement

    def measured(self, target: str) -> Measured:
        """Return the measurements for a target, given as JSON, that still hold.

        Raises `DatabaseError` if there is no such file, it cannot be read, or a line is no
        measurement.
        """
        wanted, digest = target_fields(target), hashlib.sha1()
        times: dict[str, dict[Size, dict[TilePlan, float]]] = {}
        for measurement in self.lines():
            if measurement.target != wanted:
                continue
            plan, size = _plan(measurement), _size(measurement)
            if plan is None or size is None:
                continue
            key = workload_key(measurement.workload)
            digest.update(f"{key} {size} {plan.key} {measurement.seconds}".encode())
            times.setdefault(key, {}).setdefault(size, {})[plan] = measurement.seconds
        return Measured(digest.hexdigest(), times)

    def create(self) -> None:
        """Make an empty file if there is none.

        Raises `DatabaseError` if there is one that cannot be written, or none can be made.
        """
        self._append("")

    def add(self, measurement: Measurement) -> None:
        """Append a measurement; raise `DatabaseError` if the file cannot be written."""
        told = {"format": FORMAT, **asdict(measurement)}
        self._append(json.dumps(told, allow_nan=False) + "\n")

    def _append(self, text: str) -> None:
        try:
            with locked(self.path) as descriptor:
                self._mend(descriptor)
                left = text.encode()
                while left:
                    left = left[os.write(descriptor, left) :]
        except OSError as err:
            why = f"cannot be written ({err.strerror})"
            raise DatabaseError(f"database {self.path} {why}") from err

    def _mend(self, descriptor: int) -> None:
        """Complete or cut the last line, where a writer was killed in the middle of it."""
        size = os.fstat(descriptor).st_size
        start = max(0, size - _LONGEST)
        tail = os.pread(descriptor, size - start, start)
        last = tail[tail.rfind(b"\n") + 1 :]
        if not last:
            return
        if len(last) == _LONGEST or not _is_begun(last):
            raise DatabaseError(f"database {self.path}: its last line is no measurement")
        if _is_json(last):
            os.write(descriptor, b"\n")
        else:
            _LOG.warning("%s: the last line was cut off, and is removed", self.path)
            os.ftruncate(descriptor, size - len(last))

    def lines(self) -> Iterator[Measurement]:
        """Yield the measurements that this version can read, those of other kernels among them.

        Raises `DatabaseError` as `measured`.
        """
        try:
            data = read_file(self.path)
        except OSError as err:
            raise DatabaseError(f"database {self.path} cannot be read ({err.strerror})") from err
        lines = data.split(b"\n")
        if lines[-1] and _is_begun(lines[-1]) and not _is_json(lines[-1]):
            _LOG.warning("%s: the last line is cut off, and left out", self.path)
            lines[-1] = b""
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            where = f"database {self.path}, line {number}"
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as err:
                raise DatabaseError(f"{where} is no JSON: {err}") from err
            if not isinstance(record, dict) or type(record.get("format")) is not int:
                raise DatabaseError(f"{where} is {shown(record)}; must have a format as a number")
            if record["format"] == FORMAT:
                yield read(Measurement, record, DatabaseError, where, unknown="ignore")


def _is_begun(line: bytes) -> bool:
    """Tell whether a line can be what a writer left that was killed in the middle of it."""
    return line.startswith(_BEGIN[: len(line)])


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _size(measurement: Measurement) -> Size | None:
    """Return the size, if it is one of such workloads."""
    size = size_from_json(measurement.size)
    of_attention = measurement.workload.get("type") == Attention.__name__
    return size if isinstance(size, AttentionSize) == of_attention else None


def _plan(measurement: Measurement) -> TilePlan | None:
    """Return the plan, if its kernel is still the one that was measured."""
    try:
        plan = plan_of(measurement.plan)
    except TilePlanError:  # of a family that is not here
        return None
    now = versions_of(plan)
    is_known = all(measurement.versions.get(name) == now[name] for name in now)
    return plan if is_known else None
