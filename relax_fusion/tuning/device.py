"""The device that kernels are measured on: of this machine, or of another one by TVM's RPC."""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tvm
from tvm import relax, rpc
from tvm.target import Target

from ..errors import TuningError
from ..hardware.target import is_gpu
from ..timing import FLUSH_BYTES
from ..validation import shown
from .compiling import FOREIGN_ERRORS, first_sentence

Function = tuple[relax.VirtualMachine, str]
"""A function, by its name, of a loaded executable."""

WARM_UP_S = 0.2
"""How long a GPU works before the first sample at a size.  An idle one, as while inputs are drawn,
lowers its clock: the first kernels took up to 3.5 times as long
(`2026-11-24-tune-bert-large.log`)."""

RPC_TIMEOUT_S = 300
"""After which a server that was asked by a tracker takes its device back."""


@dataclass(frozen=True)
class MeasuringDevice:
    """A device, and the session with the machine that has it.

    Parameters
    ----------
    device : tvm.runtime.Device
        Of the session, where there is one.
    on_gpu : bool
        Whether it is a GPU, whose caches are emptied before each sample.
    session : RPCSession, optional
        None: the device is of this machine.
    """

    device: tvm.runtime.Device
    on_gpu: bool
    session: Any = None

    @property
    def machine(self) -> str:
        """What the device calls itself, and its API's version; empty for a CPU."""
        if not self.on_gpu:
            return ""
        return f"{self.device.device_name}, API {self.device.api_version}"

    def load(self, executable: relax.VMExecutable) -> relax.VirtualMachine:
        """Return a virtual machine that runs an executable there."""
        if self.session is None:
            return relax.VirtualMachine(executable, self.device)
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "tuned.so"
            executable.export_library(str(path))
            self.session.upload(str(path))
        return relax.VirtualMachine(self.session.load_module(path.name), self.device)

    def tensor(self, value: Any) -> Any:
        """Bring an array there; a number stays one."""
        return tvm.runtime.tensor(value, self.device) if isinstance(value, np.ndarray) else value

    def results(self, function: Function, arguments: Sequence[Any]) -> list[np.ndarray]:
        """Call a function and return what it returns."""
        machine, name = function
        machine.module["set_input"](name, *arguments)  # the machine's own method takes no numbers
        machine.invoke_stateful(name)
        made = machine.get_outputs(name)
        return [out.numpy() for out in (made if isinstance(made, tuple) else (made,))]

    def warm_up(self, function: Function, arguments: Sequence[Any]) -> None:
        """Call a function until a GPU's clock has risen; a CPU is left alone."""
        end = time.monotonic() + WARM_UP_S
        while self.on_gpu and time.monotonic() < end:
            self.sample(function, arguments, 10)

    def sample(self, function: Function, arguments: Sequence[Any], count: int) -> list[float]:
        """Return the seconds of `count` calls of a function, after one more to warm up."""
        machine, name = function
        machine.module["save_function"](name, f"{name}_timed", 0, *arguments)
        flush = FLUSH_BYTES if self.on_gpu else 0  # a CPU's would take longer than most kernels
        timed = machine.module.time_evaluator(
            f"{name}_timed", self.device, number=1, repeat=count, cache_flush_bytes=flush
        )
        return list(timed().results)


def open_device(target: Target, where: str | None) -> MeasuringDevice:
    """Find the device that a target is for.

    Parameters
    ----------
    where : str, optional
        ``"host:port"`` of an RPC server, or ``"host:port/key"`` of a tracker that knows servers by
        a key; this machine by default.

    Raises
    ------
    TuningError
        If there is no such device, or nobody answers.
    """
    kind = target.kind.name
    session = None if where is None else _session(where)
    device = tvm.device("cpu" if kind == "llvm" else kind)
    if session is not None:
        device = session.device("cpu" if kind == "llvm" else kind)
    if not device.exist:
        place = f"at {where}" if where else "on this machine"
        hint = "" if where else "; rpc='host:port' (--rpc host:port) measures on another"
        raise TuningError(f"target {kind}: no such device {place}{hint}")
    return MeasuringDevice(device, is_gpu(target), session)


def _session(where: str) -> Any:
    found = re.fullmatch(r"([^/\s]+):(\d{1,5})(?:/(\S+))?", where)
    if found is None:
        text = "must be host:port of a server, or host:port/key of a tracker"
        raise TuningError(f"rpc is {shown(where)}; {text}")
    host, port, key = found[1], int(found[2]), found[3]
    try:
        if key is None:
            return rpc.connect(host, port)
        return rpc.connect_tracker(host, port).request(key, session_timeout=RPC_TIMEOUT_S)
    except FOREIGN_ERRORS as err:
        raise TuningError(f"rpc {where}: no session ({first_sentence(err)})") from err
