"""Running a compiled model: its weights, caches and position, with checks of what it is given."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import tvm
from tvm import relax

from ..errors import ContextOverflowError, InputError, ModelError, warn
from ..validation import MAX_INT32, plain, shown
from .config import BertConfig
from .export import ExportedModel
from .threads import use_all_cores
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


class _Runner:
    """What a decoder and an encoder session share: the VM, the device and the weights."""

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


class Generator(_Runner):
    """A compiled decoder with its weights, caches and position.

    On a CPU it runs with a thread for each processor that the process may use; the environment
    variable ``TVM_NUM_THREADS`` sets another number.

    Parameters
    ----------
    compiled : tvm.relax.VMExecutable or tvm.runtime.Module
        What ``tvm.compile(exported.mod, target)`` returned, or a library that was loaded.
    exported : ExportedModel
        The model that was compiled.
    weights : Iterable[numpy.ndarray]
        One array for each of ``exported.params``; from `load_weights` or `random_weights`. They
        are copied to the device one at a time.
    device : tvm.runtime.Device, optional
        Where to run; the CPU by default.
    batch : int, optional
        Number of sequences, where the module was exported with a symbolic batch.
    """

    def __init__(
        self,
        compiled: Any,
        exported: ExportedModel,
        weights: Iterable[np.ndarray],
        device: tvm.runtime.Device | None = None,
        batch: int | None = None,
    ) -> None:
        batch = plain(batch)
        if batch is not None and (type(batch) is not int or not 1 <= batch <= MAX_INT32):
            raise InputError(f"batch is {shown(batch)}; must be an integer of at least 1")
        check_exported(exported)
        if "decode" not in exported.functions:
            raise ModelError("this model is an encoder; run it with Encoder, not Generator")
        super().__init__(compiled, exported, weights, device)
        fixed = exported.batch if isinstance(exported.batch, int) else None
        self.batch = batch if batch is not None else fixed or 1
        if fixed is not None and self.batch != fixed:
            raise InputError(f"the model was exported for batch {fixed}, not {self.batch}")
        self.length = 0
        self._caches = [
            self._put(np.zeros((self.batch, *map(int, shape[1:])), exported.dtype))
            for shape in exported.cache_shapes
        ]

    def reset(self) -> None:
        """Forget the context; the next `prefill` starts at position 0."""
        # Rows at or after ``length`` are never read, so the caches need not be cleared.
        self.length = 0

    def prefill(self, ids: Any) -> np.ndarray:
        """Append tokens to the context.

        Parameters
        ----------
        ids : array_like of int
            ``[length]`` or ``[batch, length]``.

        Returns
        -------
        numpy.ndarray
            float32 logits of the last position, ``[batch, vocab]``.

        Raises
        ------
        ContextOverflowError
            If the context would be longer than ``exported.max_seq_len``.
        InputError
            If the tokens have the wrong shape or are outside the vocabulary.
        """
        return self._call("prefill", ids)

    def decode(self, ids: Any) -> np.ndarray:
        """Append one token to each sequence; float32 logits ``[batch, vocab]``.

        Parameters
        ----------
        ids : int or array_like of int
            One token, ``[batch]`` or ``[batch, 1]``.

        Returns
        -------
        numpy.ndarray
            float32 ``[batch, vocab]``.

        Raises
        ------
        ContextOverflowError
            If the context is full.
        InputError
            If there are more or fewer tokens, or one is outside the vocabulary.
        """
        tokens = array(ids, "token ids")
        if tokens.size != self.batch:
            raise InputError(f"decode takes {self.batch} token(s), got {tokens.size}")
        return self._call("decode", tokens.reshape(self.batch, 1))

    def generate(self, ids: Any, max_new_tokens: int) -> np.ndarray:
        """Forget the context, then extend ``ids`` greedily.

        Parameters
        ----------
        ids : array_like of int
            The prompt, ``[length]`` or ``[batch, length]``.
        max_new_tokens : int
            How many tokens to add to each sequence.

        Returns
        -------
        numpy.ndarray
            int32 ``[batch, max_new_tokens]``: the new tokens only.

        Raises
        ------
        ContextOverflowError
            If the prompt and the new tokens do not fit ``exported.max_seq_len``.
        InputError
            If the prompt is not one that `prefill` takes, or `max_new_tokens` is below 1.
        """
        if not isinstance(max_new_tokens, int | np.integer) or max_new_tokens < 1:
            raise InputError(f"max_new_tokens is {shown(max_new_tokens)}; must be at least 1")
        # The last new token is never fed back, so it takes no room.
        self._check_room(np.atleast_2d(array(ids, "token ids")).shape[-1] + max_new_tokens - 1)
        self.reset()
        new = [self.prefill(ids).argmax(axis=-1)]
        while len(new) < max_new_tokens:
            new.append(self.decode(new[-1]).argmax(axis=-1))
        return np.stack(new, axis=1).astype(np.int32)

    def _check_room(self, total: int) -> None:
        limit = self.exported.max_seq_len
        if total > limit:
            raise ContextOverflowError(
                f"{total} tokens do not fit the context of max_seq_len={limit}; "
                "shorten the prompt, reset, or export with a larger max_seq_len"
            )

    def _call(self, function: str, ids: Any) -> np.ndarray:
        tokens = self._tokens(ids, "token ids", self.exported.config.vocab_size)
        if tokens.shape[0] != self.batch:
            raise InputError(f"the session has batch {self.batch}, got {tokens.shape[0]} rows")
        total = self.length + tokens.shape[1]
        self._check_room(total)
        use_all_cores()
        shape = tvm.runtime.ShapeTuple([total])
        logits, _ = self.machine[function](self._put(tokens), shape, self._caches, self._params)
        self.length = total
        return finite(logits.numpy()[:, 0])


class Encoder(_Runner):
    """A compiled BERT encoder with its weights; parameters as `Generator`."""

    def __init__(
        self,
        compiled: Any,
        exported: ExportedModel,
        weights: Iterable[np.ndarray],
        device: tvm.runtime.Device | None = None,
    ) -> None:
        check_exported(exported)
        if not isinstance(exported.config, BertConfig):
            raise ModelError("this model is a decoder; run it with Generator, not Encoder")
        self._config = exported.config
        super().__init__(compiled, exported, weights, device)

    def encode(
        self, ids: Any, token_type_ids: Any = None, attention_mask: Any = None
    ) -> np.ndarray:
        """Run the encoder on whole sequences.

        Parameters
        ----------
        ids : array_like of int
            ``[length]`` or ``[batch, length]``.
        token_type_ids : array_like of int, optional
            Segment of each position; 0 by default.
        attention_mask : array_like of int, optional
            1 keeps a position, 0 hides it; all kept by default.

        Returns
        -------
        numpy.ndarray
            float32 ``[batch, length, vocab]``; of a bare model ``[batch, length, hidden]``.
        """
        tokens = self._tokens(ids, "token ids", self._config.vocab_size)
        batch = self.exported.batch
        if isinstance(batch, int) and tokens.shape[0] != batch:
            raise InputError(f"the model was exported for batch {batch}, got {tokens.shape[0]}")
        if tokens.shape[1] > self.exported.max_seq_len:
            raise ContextOverflowError(
                f"{tokens.shape[1]} tokens are more than max_seq_len={self.exported.max_seq_len}"
            )
        types = np.zeros_like(tokens) if token_type_ids is None else token_type_ids
        types = self._tokens(types, "token_type_ids", self._config.type_vocab_size)
        mask = np.ones_like(tokens) if attention_mask is None else attention_mask
        mask = self._tokens(mask, "attention_mask", 2)
        for name, value in (("token_type_ids", types), ("attention_mask", mask)):
            if value.shape != tokens.shape:
                raise InputError(
                    f"{name} has shape {list(value.shape)}, the token ids {list(tokens.shape)}"
                )
        use_all_cores()
        inputs = [self._put(value) for value in (tokens, types, mask)]
        return self.machine["encode"](*inputs, self._params).numpy()
