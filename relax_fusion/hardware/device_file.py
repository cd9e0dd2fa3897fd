"""Files that `relax-fusion calibrate` writes: a device by the rates that were measured on it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from ..errors import TargetError
from ..files import read_file, write_file
from ..validation import check, json_text, read_json, shown
from .devices import DEVICES, generic_cpu
from .spec import DeviceSpec

FORMAT = 1
"""Version of a file."""

Source = Literal["measured", "from data sheet", "assumed"]

TOLD = {"gpu": ("sm_count", "l2_bytes"), "cpu": ("sm_count", "vector_bytes")}
"""Fields of `DeviceSpec` that the driver or the target tells, by the kind of the device."""

_RATES = {f.name for f in fields(DeviceSpec) if str(f.type) == "float"}


@dataclass(frozen=True)
class Rate:
    """A rate of a device, and where it comes from."""

    value: float  # in the unit of the field of `DeviceSpec`
    source: Source  # "measured": times of kernels on this device tell it


@dataclass(frozen=True)
class Timed:
    """The time of a kernel of the sweep."""

    probe: str
    """Which one."""
    plan: str
    """Key of its plan; empty where it has none."""
    seconds: float
    predicted_s: float
    """What it took, and what the rates of the file say of it."""


@dataclass(frozen=True)
class DeviceFile:
    """What a sweep found out."""

    label: str
    """How messages call the device."""
    base: str
    """Name of the device in `DEVICES` whose other numbers these are; ``"cpu"`` of a processor."""
    target: dict[str, Any]
    """The TVM target, without its host."""
    machine: str
    """What the device calls itself."""
    versions: dict[str, str]
    """Of the packages whose kernels were measured."""
    numbers: dict[str, int]
    """Fields of `DeviceSpec` that the driver or the target tells."""
    rates: dict[str, Rate]
    """Fields of `DeviceSpec` that prices are made of."""
    times: tuple[Timed, ...] = ()
    """What was measured."""
    left: tuple[str, ...] = ()
    """What was not, with the reason."""
    format: Literal[1] = 1

    def __post_init__(self) -> None:
        check(self, TargetError, "device file")

    @property
    def spec(self) -> DeviceSpec:
        """The device, named after its base and these rates.

        Raises `TargetError` if a number contradicts another one or names no field, nobody knows the
        base, or the target is of another kind.
        """
        base = DEVICES.get(self.base)
        if base is None:
            known = ", ".join(sorted(name for name in DEVICES if "@" not in name))
            raise TargetError(f"base is {shown(self.base)}, must be of {known}")
        values: dict[str, Any] = {n: rate.value for n, rate in self.rates.items()} | self.numbers
        unknown = sorted(self.rates.keys() - _RATES | self.numbers.keys() - {*TOLD[base.kind]})
        if unknown:
            raise TargetError(f"a device of kind {base.kind} has no number {shown(unknown[0])}")
        kind = "llvm" if base.kind == "cpu" else base.target_kind
        if self.target.get("kind", kind) != kind:
            given = f"its target is of kind {shown(self.target['kind'])}"
            raise TargetError(f"{given}, must be {kind!r} as base is {self.base!r}")
        if base.kind == "cpu":
            cores = self.numbers.get("sm_count", base.sm_count)
            base = generic_cpu(cores, self.numbers.get("vector_bytes", base.vector_bytes))
        digest = hashlib.sha1(json.dumps([self.base, values], sort_keys=True).encode())
        return replace(
            base,
            name=f"{self.base}@{digest.hexdigest()[:8]}",
            label=self.label,
            measured=any(rate.source == "measured" for rate in self.rates.values()),
            **values,
        )

    def write(self, path: Path) -> None:
        """Write the file, as a whole; raise `OSError` if it cannot be written."""
        write_file(path, json_text(self) + "\n")


def read_device_file(path: Path) -> DeviceFile:
    """Read what `calibrate` wrote.

    Raises `TargetError` if it cannot be read, is no such file, or describes no device.
    """
    try:
        text = read_file(path)
    except (OSError, ValueError) as err:  # a name with a NUL is no name
        why = err.strerror if isinstance(err, OSError) else err
        raise TargetError(f"device file {path} cannot be read ({why})") from err
    found: DeviceFile = read_json(DeviceFile, text, TargetError, f"device file {path}")
    try:
        _ = found.spec
    except TargetError as err:
        raise TargetError(f"device file {path}: {err}") from err
    return found


def registered(found: DeviceFile) -> DeviceSpec:
    """Return the device of a file, which targets name by its `DeviceSpec.name` from now on."""
    spec = found.spec
    return DEVICES.setdefault(spec.name, spec)
