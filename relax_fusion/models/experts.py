"""A feed-forward network of experts, of which each token goes to a few."""

from __future__ import annotations

from tvm import relax
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import Tensor, op
from tvm.relax.frontend.nn.core import wrap_nested

from .config import LlamaConfig
from .expert_config import Experts
from .layers import ExpertLinear, Recipe, Router, activation, in_float32


class LlamaExperts(nn.Module):
    """Gated feed-forward networks; the weights of experts lie one after the other."""

    def __init__(self, config: LlamaConfig, experts: Experts) -> None:
        hidden, wide, self.experts = config.hidden_size, experts.features, experts.count
        self.chosen, self.renormalised = experts.chosen, experts.renormalised
        self.hidden_act = config.hidden_act
        self.gate = Router(hidden, self.experts, bias=False)
        self.gate_up_proj = ExpertLinear(hidden, self.experts * 2 * wide, bias=False)
        self.down_proj = ExpertLinear(wide, self.experts * hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[batch, seq_len, hidden]`` to itself through the experts of each token."""
        batch, seq_len, hidden = x.shape
        rows = op.reshape(x, (batch * seq_len, hidden))
        shares, ids = self._routed(rows)
        pairs = batch * seq_len * self.chosen
        numbers = op.reshape(ids, (pairs,))
        wide = op.broadcast_to(op.unsqueeze(rows, 1), (batch * seq_len, self.chosen, hidden))
        gate_up = self._product(self.gate_up_proj, op.reshape(wide, (pairs, hidden)), numbers)
        gate, up = op.split(gate_up, 2, axis=-1)
        made = self._product(self.down_proj, activation(self.hidden_act, gate) * up, numbers)
        made = op.reshape(in_float32(made), (batch * seq_len, self.chosen, hidden))
        total = op.sum(made * op.unsqueeze(shares, -1), axis=1)
        return op.reshape(op.astype(total, x.dtype), (batch, seq_len, hidden))

    def _routed(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return shares, in float32, and numbers of experts, ``[tokens, chosen]`` each."""
        probabilities = op.softmax(in_float32(self.gate(rows)), axis=-1)
        best = relax.op.topk(probabilities._expr, self.chosen, axis=-1, ret_type="both")
        shares, ids = wrap_nested(best, "chosen")
        if self.renormalised:
            shares = shares / op.sum(shares, axis=-1, keepdims=True)
        return shares, ids

    def _product(self, layer: nn.Linear, rows: Tensor, numbers: Tensor) -> Tensor:
        """Multiply each row by the weight of its expert."""
        count, k = layer.weight.shape
        pairs = rows.shape[0]
        table = op.reshape(layer.weight, (self.experts, count // self.experts, k))
        weight = wrap_nested(relax.op.take(table._expr, numbers._expr, axis=0), "weight")
        product = op.matmul(weight, op.reshape(rows, (pairs, k, 1)))
        return op.reshape(product, (pairs, count // self.experts))


def expert_recipes(config: LlamaConfig, experts: Experts, layer: str) -> dict[str, Recipe]:
    """Return how the weights of a layer are made of those of single experts in a checkpoint."""
    mixtral = experts.names == "mixtral"
    theirs = f"{layer}.block_sparse_moe" if mixtral else f"{layer}.mlp"
    first, second, last = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    each = [f"{theirs}.experts.{e}" for e in range(experts.count)]

    def recipe(rows: int, *parts: str) -> Recipe:
        names = tuple(f"{expert}.{part}.weight" for expert in each for part in parts)
        return Recipe(names, rows=(rows,) * len(names))

    return {
        f"{layer}.mlp.gate.weight": Recipe((f"{theirs}.gate.weight",)),
        f"{layer}.mlp.gate_up_proj.weight": recipe(experts.features, first, second),
        f"{layer}.mlp.down_proj.weight": recipe(config.hidden_size, last),
    }
