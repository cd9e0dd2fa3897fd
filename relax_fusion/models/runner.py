"""What sessions share: the virtual machine, the weights, checks of what they are given."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import tvm
from tvm import relax

from ..errors import InputError, warn
from ..validation import shown
from .export import ExportedModel
from .weights import NotFiniteWarning


def check_exported(exported: Any) -> None:
    """Refuse what is no description of a model."""
    if not isinstance(exported, ExportedModel):
        raise InputError(f"exported is {shown(exported)}; must be what export returned")


def checked_device(device: Any) -> tvm.runtime.Device:
    """Return the device to run on, if there is such a one."""
    if device is None:
        return tvm.cpu()
    if not isinstance(device, tvm.runtime.Device):
        raise InputError(f"device is {shown(device)}; must be a tvm.runtime.Device")
    if not device.exist:
        raise InputError(f"device is {shown(device)}, which TVM does not find here")
    return device


def machine(
    compiled: Any, exported: ExportedModel, device: tvm.runtime.Device
) -> relax.VirtualMachine:
    """Return the virtual machine that runs the functions of the model."""
    try:
        made = relax.VirtualMachine(compiled, device)
    except (ValueError, TypeError, AttributeError) as err:
        raise InputError(
            f"compiled is {shown(compiled)}; must be what tvm.compile returned, or a library"
        ) from err
    for name in exported.functions:
        try:
            made[name]
        except (AttributeError, LookupError) as err:
            raise InputError(f"compiled has no function {name!r}; was it of this model?") from err
    return made


def array(values: Any, what: str) -> np.ndarray:
    """Return `values` as an array of NumPy's."""
    try:
        return np.asarray(values)
    except (ValueError, TypeError, OverflowError) as err:
        raise InputError(f"{what} are {shown(values)}; must be an array ({err})") from err


def finite(logits: np.ndarray) -> np.ndarray:
    """Warn of logits by which no token can be chosen: the largest of NaN is the first."""
    if not np.isfinite(logits).all():
        text = "the model's logits hold NaN or infinities; look at its weights"
        warn(text, NotFiniteWarning)
    return logits


def checked_weight(value: Any, position: int, exported: ExportedModel) -> np.ndarray:
    """Return a weight if it is the one that stands at `position`."""
    if position >= len(exported.params):
        raise InputError(f"the model takes {len(exported.params)} weights, got more")
    param = exported.params[position]
    if not isinstance(value, np.ndarray):
        raise InputError(f"the weight {param.name!r} is {shown(value)}; must be a NumPy array")
    if value.shape != param.shape or str(value.dtype) != param.dtype:
        raise InputError(
            f"the weight {param.name!r} must be {param.dtype} {list(param.shape)}, got "
            f"{value.dtype} {list(value.shape)}"
        )
    return value


class Runner:
    """The VM, the device and the weights."""

    def __init__(
        self,
        compiled: Any,
        exported: ExportedModel,
        weights: Iterable[np.ndarray],
        device: tvm.runtime.Device | None,
    ) -> None:
        self.device = checked_device(device)
        self.exported = exported
        self.machine = machine(compiled, exported, self.device)
        self._params: list[tvm.runtime.Tensor] = []
        if not isinstance(weights, Iterable):
            raise InputError(f"weights is {shown(weights)}; must be NumPy arrays, in order")
        for value in weights:
            self._params.append(self._put(checked_weight(value, len(self._params), exported)))
        if len(self._params) != len(exported.params):
            count = len(exported.params)
            raise InputError(f"the model takes {count} weights, got {len(self._params)}")

    def _put(self, value: np.ndarray) -> tvm.runtime.Tensor:
        return tvm.runtime.tensor(value, self.device)

    def _tokens(self, values: Any, what: str, limit: int) -> np.ndarray:
        tokens = np.atleast_2d(array(values, what))
        if tokens.ndim != 2 or tokens.size == 0 or not np.issubdtype(tokens.dtype, np.integer):
            raise InputError(
                f"{what} must be integers of 64 bits, of shape [batch, length] and not empty, got "
                f"{tokens.dtype} {list(tokens.shape)}"
            )
        if tokens.min() < 0 or tokens.max() >= limit:
            raise InputError(
                f"{what} must be in 0..{limit - 1}, got {tokens.min()}..{tokens.max()}"
            )
        return tokens.astype(np.int32)
