"""Running a compiled model: its weights, caches and position, with checks of what it is given."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import tvm

from ..errors import ContextOverflowError, InputError, ModelError
from ..validation import MAX_INT32, plain, shown
from .config import BertConfig
from .export import ExportedModel
from .runner import Runner, array, check_exported, finite
from .threads import use_all_cores

LEAST_REACH = 128
"""A step on a GPU is given at least so many rows of the caches, and then twice as many each time:
a graph is captured for each of these numbers, and no kernel reads rows behind the length."""


class Generator(Runner):
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
        if exported.shards > 1:
            raise ModelError(
                f"the model was exported for {exported.shards} workers; run it with "
                "ParallelGenerator, not Generator"
            )
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
        # What `decode` counts on itself, in memory that is the same for all of its calls
        self._ids = self._put(np.zeros((self.batch, 1), "int32"))
        self._length = self._put(np.zeros(1, "int32"))

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
        tokens = self._checked(ids)
        self._check_room(total := self.length + tokens.shape[1])
        use_all_cores()
        shape = tvm.runtime.ShapeTuple([total])
        function = self.machine["prefill"]
        logits, _ = function(self._put(tokens), shape, self._caches, self._params)
        self.length = total
        return finite(logits.numpy()[:, 0])

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
        tokens = self._checked(tokens.reshape(self.batch, 1))
        self._check_room(self.length + 1)
        self._begin(tokens)
        return finite(self._step().numpy()[:, 0])

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
        first = self.prefill(ids).argmax(axis=-1)
        shape = (max_new_tokens - 1, self.batch)
        rest = tvm.runtime.empty(shape, "int32", self.device)
        self._begin(first[:, None].astype("int32"))
        for i in range(max_new_tokens - 1):
            logits = self._step()
            place = rest._create_view(self._ids.shape, "int32", 4 * self.batch * i)
            self._ids.copyto(place)
        if max_new_tokens > 1:
            finite(logits.numpy())
        return np.concatenate([first[None], rest.numpy()]).T.astype(np.int32)

    def _check_room(self, total: int) -> None:
        limit = self.exported.max_seq_len
        if total > limit:
            raise ContextOverflowError(
                f"{total} tokens do not fit the context of max_seq_len={limit}; "
                "shorten the prompt, reset, or export with a larger max_seq_len"
            )

    def _checked(self, ids: Any) -> np.ndarray:
        tokens = self._tokens(ids, "token ids", self.exported.config.vocab_size)
        if tokens.shape[0] != self.batch:
            raise InputError(f"the session has batch {self.batch}, got {tokens.shape[0]} rows")
        return tokens

    def _begin(self, tokens: np.ndarray) -> None:
        """Put the tokens of the next step, ``[batch, 1]``, and their place on the device."""
        self._ids.copyfrom(tokens)
        self._length.copyfrom(np.array([self.length], "int32"))

    def _step(self) -> tvm.runtime.Tensor:
        """Run one token of each sequence; logits ``[batch, 1, vocab]``, until the next step."""
        use_all_cores()
        self.length += 1
        reach = tvm.runtime.ShapeTuple([self._reach()])
        given = self._ids, self._length, reach, self._caches, self._params
        return self.machine["decode"](*given)[0]

    def _reach(self) -> int:
        """Return how many rows of the caches a step is given: on a GPU one of few, for graphs."""
        if self.device == tvm.cpu():
            return self.length
        reach = max(LEAST_REACH, 1 << (self.length - 1).bit_length())
        return min(reach, self.exported.max_seq_len)


class Encoder(Runner):
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
        self._inputs: list[tvm.runtime.Tensor] = []

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
        if self.exported.seq_len not in (None, tokens.shape[1]):
            raise InputError(
                f"the model was exported for {self.exported.seq_len} tokens, got {tokens.shape[1]}"
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
        # In the same memory as before where the size is, for which a graph is captured
        if not self._inputs or tuple(self._inputs[0].shape) != tokens.shape:
            self._inputs = [self._put(value) for value in (tokens, types, mask)]
        for kept, value in zip(self._inputs, (tokens, types, mask), strict=True):
            kept.copyfrom(value)
        return self.machine["encode"](*self._inputs, self._params).numpy()
