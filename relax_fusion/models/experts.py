"""A feed-forward network of experts, of which each token goes to a few."""

from __future__ import annotations

from functools import partial
from math import inf

import numpy as np
from tvm import relax
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import Tensor, op
from tvm.relax.frontend.nn.core import wrap_nested

from .config import LlamaConfig
from .expert_config import Choice, Experts
from .layers import ExpertLinear, Recipe, Router, activation, in_float32, slice_rows


class LlamaExperts(nn.Module):
    """Gated feed-forward networks; the weights of experts lie one after the other."""

    def __init__(self, config: LlamaConfig, experts: Experts) -> None:
        hidden, wide = config.hidden_size, experts.features
        self.form, self.hidden_act = experts, config.hidden_act
        self.experts = experts.count + experts.shared
        self.gate = Router(hidden, experts.count + experts.has_shared_gate, bias=experts.biases)
        if experts.choice.sigmoid:
            self.correction = Correction(experts.count)
        self.gate_up_proj = ExpertLinear(hidden, self.experts * 2 * wide, bias=False)
        self.down_proj = ExpertLinear(wide, self.experts * hidden, bias=False)
        if experts.biases:
            self.gate_up_bias = nn.Parameter((self.experts, 2 * wide))
            self.down_bias = nn.Parameter((self.experts, hidden))

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[batch, seq_len, hidden]`` to itself through the experts of each token."""
        batch, seq_len, hidden = x.shape
        rows = op.reshape(x, (batch * seq_len, hidden))
        shares, ids = self._routed(rows)
        chosen = self.form.chosen + self.form.shared
        pairs = batch * seq_len * chosen
        numbers = op.reshape(ids, (pairs,))
        wide = op.broadcast_to(op.unsqueeze(rows, 1), (batch * seq_len, chosen, hidden))
        gate_up = self._product("gate_up", op.reshape(wide, (pairs, hidden)), numbers)
        made = self._product("down", self._gated(gate_up), numbers)
        made = op.reshape(in_float32(made), (batch * seq_len, chosen, hidden))
        total = op.sum(made * op.unsqueeze(shares, -1), axis=1)
        return op.reshape(op.astype(total, x.dtype), (batch, seq_len, hidden))

    def _routed(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return shares, in float32, and numbers of experts, ``[tokens, chosen]`` each.

        Shares that are divided by their sum are also the softmax of the scores that were chosen.
        Parts of a network that all tokens go to are chosen behind the others.
        """
        scores, count, parts = in_float32(self.gate(rows)), self.form.count, self.form.shared
        has_gate = self.form.has_shared_gate
        shares, ids = self._best(slice_rows(scores, 1, 0, count) if has_gate else scores)
        if not parts:
            return shares, ids
        own = op.sigmoid(slice_rows(scores, 1, count, count + 1)) if has_gate else _number(1.0)
        size = (rows.shape[0], parts)
        own = op.broadcast_to(own, size)
        numbers = relax.const(np.arange(count, count + parts, dtype=ids.dtype)[None])
        numbers = op.broadcast_to(wrap_nested(numbers, "numbers"), size)
        return op.concat([shares, own], dim=-1), op.concat([ids, numbers], dim=-1)

    def _best(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Return the shares and the numbers of the experts that are chosen by their scores."""
        choice = self.form.choice
        shares = op.sigmoid(scores) if choice.sigmoid else op.softmax(scores, axis=-1)
        wanted = shares + self.correction.weight if choice.sigmoid else shares
        if choice.groups > 1:
            wanted = _within_groups(wanted, choice)
        best, ids = _topk(wanted, self.form.chosen)
        if choice.sigmoid:
            chosen = relax.op.gather_elements(shares._expr, ids._expr, axis=1)
            best = wrap_nested(chosen, "shares")
        if self.form.renormalised:
            total = op.sum(best, axis=-1, keepdims=True)
            best = best / (total + 1e-20 if choice.sigmoid else total)
        return (best if choice.factor == 1.0 else best * choice.factor), ids

    def _gated(self, gate_up: Tensor) -> Tensor:
        """Return the activated gate times the rest."""
        gate, up = op.split(gate_up, 2, axis=-1)
        limit = self.form.limit
        if limit is None:
            return activation(self.hidden_act, gate) * up
        gate, up = _clipped(gate, -inf, limit), _clipped(up, -limit, limit)
        return (up + 1.0) * (gate * op.sigmoid(gate * self.form.sharpness))

    def _product(self, name: str, rows: Tensor, numbers: Tensor) -> Tensor:
        """Multiply each row by the weight of its expert, and add its bias if there are some."""
        weight = getattr(self, f"{name}_proj").weight
        count, k = weight.shape
        pairs, columns = rows.shape[0], count // self.experts
        chosen = _rows(op.reshape(weight, (self.experts, columns, k)), numbers)
        product = op.matmul(chosen, op.reshape(rows, (pairs, k, 1)))
        product = op.reshape(product, (pairs, columns))
        if not self.form.biases:
            return product
        return product + _rows(getattr(self, f"{name}_bias"), numbers)


class Correction(nn.Module):
    """What is added to scores where experts are chosen, in float32."""

    def __init__(self, experts: int) -> None:
        self.weight = nn.Parameter((experts,), dtype="float32")

    def to(self, dtype: str | None = None) -> None:
        """Keep the type: others would be chosen."""


def _topk(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    return wrap_nested(relax.op.topk(scores._expr, count, axis=-1, ret_type="both"), "chosen")


def _number(value: float) -> Tensor:
    return wrap_nested(relax.const(value, "float32"), "number")


def _within_groups(scores: Tensor, choice: Choice) -> Tensor:
    """Return scores ``[tokens, experts]`` in the best groups, and the lowest in all others.

    A group is as good as its best expert, with biases as its two best.
    """
    tokens, count = scores.shape
    grouped = op.reshape(scores, (tokens, choice.groups, count // choice.groups))
    best = op.sum(_topk(grouped, 2 if choice.sigmoid else 1)[0], axis=-1)
    _, groups = _topk(best, choice.chosen_groups)
    ones = op.broadcast_to(_number(1.0), (tokens, choice.chosen_groups))
    zeros = relax.op.full_like(best._expr, relax.const(0.0, "float32"))
    marked = relax.op.scatter_elements(zeros, groups._expr, ones._expr, axis=1)
    wide = op.broadcast_to(op.unsqueeze(wrap_nested(marked, "marked"), -1), grouped.shape)
    hidden = relax.op.bitwise_not(op.astype(op.reshape(wide, (tokens, count)), "bool")._expr)
    lowest = _number(-inf if choice.sigmoid else 0.0)
    return op.where(wrap_nested(hidden, "hidden"), lowest, scores)


def _rows(table: Tensor, numbers: Tensor) -> Tensor:
    return wrap_nested(relax.op.take(table._expr, numbers._expr, axis=0), "rows")


def _clipped(x: Tensor, least: float, most: float) -> Tensor:
    return wrap_nested(relax.op.clip(x._expr, least, most), "clipped")


def expert_recipes(config: LlamaConfig, experts: Experts, layer: str) -> dict[str, Recipe]:
    """Return how the weights of a layer are made of those of its experts in a checkpoint."""
    if experts.names == "gpt_oss":
        return _stacked(config.hidden_size, experts, f"{layer}.mlp")
    mixtral = experts.names == "mixtral"
    theirs = f"{layer}.block_sparse_moe" if mixtral else f"{layer}.mlp"
    first, second, last = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    each = [f"{theirs}.experts.{e}" for e in range(experts.count)]

    own = "shared_experts" if experts.names == "deepseek" else "shared_expert"
    wide, shared = experts.features, f"{theirs}.{own}"
    spans = [(n * wide, (n + 1) * wide) for n in range(experts.shared)]

    def recipe(rows: int, axis: int, *parts: str) -> Recipe:
        names = [f"{expert}.{part}.weight" for expert in each for part in parts]
        own = [(f"{shared}.{part}.weight", (axis, *span)) for span in spans for part in parts]
        names, cuts = [*names, *(n for n, _ in own)], [None] * len(names) + [cut for _, cut in own]
        return Recipe(tuple(names), rows=(rows,) * len(names), spans=tuple(cuts))

    gated = [f"{shared}_gate.weight"] if experts.has_shared_gate else []
    gates = (f"{theirs}.gate.weight", *gated)
    bias = Recipe((f"{theirs}.gate.e_score_correction_bias",))
    return {
        **({f"{layer}.mlp.correction.weight": bias} if experts.choice.sigmoid else {}),
        f"{layer}.mlp.gate.weight": Recipe(gates, rows=(experts.count, 1)[: len(gates)]),
        f"{layer}.mlp.gate_up_proj.weight": recipe(wide, 0, first, second),
        f"{layer}.mlp.down_proj.weight": recipe(config.hidden_size, 1, last),
    }


def _stacked(hidden: int, experts: Experts, mlp: str) -> dict[str, Recipe]:
    """Return recipes for tensors of all experts, ``[experts, k, n]``, gate and up in turns."""
    count, wide = experts.count, experts.features
    sizes = {"gate_up": (hidden, 2 * wide), "down": (wide, hidden)}
    found = {f"{mlp}.gate.{kind}": Recipe((f"{mlp}.router.{kind}",)) for kind in ("weight", "bias")}
    for name, (k, n) in sizes.items():
        theirs, arrange = f"{mlp}.experts.{name}_proj", partial(_arranged, name == "gate_up")
        weight = Recipe((theirs,), stored=(count, k, n), arrange=arrange)
        found[f"{mlp}.{name}_proj.weight"] = weight
        found[f"{mlp}.{name}_bias"] = Recipe(
            (f"{theirs}_bias",), stored=(count, n), arrange=arrange
        )
    return found


def _arranged(turns: bool, stored: np.ndarray) -> np.ndarray:
    """Return weights as rows ``[experts * n, k]``, or biases ``[experts, n]``, by halves."""
    if turns:
        stored = np.concatenate([stored[..., ::2], stored[..., 1::2]], axis=-1)
    if stored.ndim == 2:
        return stored
    return np.ascontiguousarray(stored.swapaxes(1, 2)).reshape(-1, stored.shape[1])
