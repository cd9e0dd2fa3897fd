"""A model that is spread over workers: what each has, and where they put their parts together.

Projections whose results are heads or wide features are cut by rows, those behind them by columns,
so that a layer has two sums over all workers.  Tables of tokens are cut by rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from tvm import relax
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import Tensor, op
from tvm.relax.frontend.nn.core import wrap_nested

from ..errors import ConfigError
from ..validation import plain, shown
from .config import BertConfig, Config, GPT2Config, LlamaConfig
from .cuts import Cut, Segment
from .kv_cache import Heads
from .layers import Embedding, Recipe

Places = dict[str, tuple[int, tuple[Segment, ...]]]


@dataclass(frozen=True)
class Shards:
    """Over how many workers a model is spread."""

    count: int = 1  # 1: nothing is cut, and no collective is called

    def segment(self, size: int, kinds: int | None = None) -> Segment:
        """Return how rows are cut of which there are `kinds` kinds, such as heads, at least."""
        return Segment(size, self.count if kinds is None else min(kinds, self.count))

    def table_recipes(self, ours: str, name: str, rows: int) -> dict[str, Recipe]:
        """Return where the parameters of an `embedding` come from, by our name and a checkpoint's.

        Nothing where it is whole.
        """
        if self.count == 1:
            return {}
        cut = Cut(self.count, 0, (self.segment(rows),))
        firsts = partial(_first_rows, self.count, self.rows(rows))
        each = Cut(self.count, 0, (self.segment(self.count),))
        return {
            f"{ours}.table.weight": Recipe((f"{name}.weight",), cut=cut),
            f"{ours}.first_row": Recipe(compute=firsts, cut=each),
        }

    def cut(self, recipes: dict[str, Recipe], places: Places) -> dict[str, Recipe]:
        """Return recipes with those of `places` cut.

        `recipes`: by name; of a parameter that is not there a checkpoint has the same.
        `places`: the axis and the segments by name; no segments: a bias that worker 0 adds.
        """
        if self.count == 1:
            return recipes
        found = dict(recipes)
        for name, (axis, segments) in places.items():
            plain_one = recipes.get(name, Recipe((name,)))
            found[name] = replace(plain_one, cut=Cut(self.count, axis, segments))
        return found

    def heads(self, config: LlamaConfig | GPT2Config) -> Heads:
        """Return the heads of a worker; those of keys and values are several workers' if few."""
        kv = max(1, config.num_kv_heads // self.count)
        return Heads(config.num_heads // self.count, kv, config.head_dim)

    def rows(self, size: int) -> int:
        """Return how many of some rows, or features, a worker has."""
        return -(-size // self.count)

    def summed(self, x: Tensor) -> Tensor:
        """Return the sum over all workers."""
        return x if self.count == 1 else op.ccl_allreduce(x, "sum")

    def added(self, x: Tensor, part: Tensor) -> Tensor:
        """Return x, which all workers have, plus the sum of their parts.

        Each adds its share of x to its part, so that the kernel that makes the part does, where
        shares are exact: halves, quarters, eighths.
        """
        if self.count & (self.count - 1):
            return x + self.summed(part)
        share = x if self.count == 1 else x * (1 / self.count)
        return self.summed(share + part)

    def joined(self, logits: Tensor, vocab: int) -> Tensor:
        """Return the logits of all tokens, ``[batch, 1, vocab]``, from those of each worker."""
        if self.count == 1:
            return logits
        batch, _, rows = logits.shape
        every = op.reshape(op.ccl_allgather(logits, self.count), (self.count, batch, 1, rows))
        if not (isinstance(batch, int) and batch == 1):
            every = op.permute_dims(every, [1, 2, 0, 3])
        every = op.reshape(every, (batch, 1, self.count * rows))
        if rows * self.count == vocab:
            return every
        cut = relax.op.strided_slice(every._expr, axes=[2], begin=[0], end=[vocab])
        return wrap_nested(cut, "logits")

    def embedding(self, rows: int, width: int) -> nn.Module:
        """Return the table of embeddings, or the part of it that a worker has."""
        return Embedding(rows, width) if self.count == 1 else EmbeddingPart(self, rows, width)


WHOLE = Shards()
"""A model that is not spread."""


class EmbeddingPart(nn.Module):
    """The rows of a table of embeddings that a worker has; the sum over workers is a lookup."""

    def __init__(self, shards: Shards, rows: int, width: int) -> None:
        self.shards, self.rows = shards, shards.rows(rows)
        self.table = Embedding(self.rows, width)
        self.first_row = nn.Parameter((1,), dtype="int32")

    @property
    def weight(self) -> Tensor:
        """The rows."""
        return self.table.weight

    def to(self, dtype: str | None = None) -> None:
        """Keep the number of the first row as it is."""
        self.table.to(dtype)

    def forward(self, ids: Tensor) -> Tensor:
        """Look up ``[batch, seq_len]`` ids: ``[batch, seq_len, width]``."""
        local = relax.op.subtract(ids._expr, self.first_row._expr)
        inside = relax.op.equal(local, relax.op.clip(local, 0, self.rows - 1))
        mask = wrap_nested(relax.op.expand_dims(inside, -1), "mine")
        found = self.table(wrap_nested(local, "local"))
        zero = wrap_nested(relax.const(0, found.dtype), "zero")
        return self.shards.summed(op.where(mask, found, zero))


def _first_rows(count: int, rows: int) -> np.ndarray:
    """Return which token the first row of each worker is."""
    return np.arange(count, dtype="int32") * np.int32(rows)


def checked_shards(config: Config, shards: Any) -> Shards:
    """Return over how many workers a model is to be spread, if it can be.

    Raises `ConfigError` if a size of the model does not divide so.
    """
    count = plain(shards)
    if type(count) is not int or count < 1:
        raise ConfigError(f"shards is {shown(count)}; must be an integer of at least 1")
    if count == 1:
        return Shards()
    if isinstance(config, BertConfig):
        raise ConfigError(f"an encoder cannot be spread over {count} workers")
    if isinstance(config, LlamaConfig) and config.experts:
        raise ConfigError(f"experts cannot be spread over {count} workers")
    for what, size in (
        ("attention heads", config.num_heads),
        ("features of the feed-forward network", config.intermediate_size),
    ):
        if size % count:
            raise ConfigError(f"the {size} {what} cannot be spread evenly over {count} workers")
    kv = config.num_kv_heads
    if kv % count and count % kv:
        raise ConfigError(
            f"the {kv} heads of keys and values cannot be spread over {count} workers; that must "
            "divide them or be a multiple"
        )
    return Shards(count)
