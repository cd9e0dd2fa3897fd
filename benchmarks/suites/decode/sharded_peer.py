"""A worker's part of a LLaMA in PyTorch: tensor parallelism by `torch.distributed`.

Projections are cut as ours are, with two all-reduces a layer, and the head's logits are gathered;
the table of embeddings is whole on every worker, so that a lookup needs no sum.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed
from torch.nn.functional import linear

from benchmarks.suites.decode.peers import Llama

if TYPE_CHECKING:
    from benchmarks.suites.decode.shard import Job


class Layer(Llama):
    """A layer, the first of its own model: all layers have one graph of torch.compile."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x, 0)

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        out = super().linear(x, name)
        if name.endswith(("o_proj", "down_proj")):
            distributed.all_reduce(out)
        return out


class Head(Llama):
    """What follows the layers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x[:, -1:], "model.norm.weight")
        rows = linear(x, self.weight("head"))
        every = rows.new_empty((distributed.get_world_size() * len(rows), *rows.shape[1:]))
        distributed.all_gather_into_tensor(every, rows)
        every = every.view(-1, *rows.shape).permute(1, 2, 0, 3).flatten(2)
        return every[..., : self.config.vocab_size]


def spread_peer(
    job: Job,
    weights: Mapping[str, torch.Tensor],
    table: torch.Tensor,
    caches: Sequence[torch.Tensor],
    *,
    is_compiled: bool = False,
) -> Callable[[torch.Tensor], Any]:
    """Return a step of all workers: from ids to logits ``[batch, 1, vocab]`` of the last tokens.

    Parameters
    ----------
    job : Job
        What is timed.
    weights : mapping of str to Tensor
        The worker's, by the names of `relax_fusion.models.export`.
    table : Tensor
        The embeddings of all tokens.
    caches : sequence of Tensor
        The worker's, in whose type everything is computed.
    is_compiled : bool
        Whether layers and head are torch.compile's.
    """
    config, shards = job.exported.config, job.exported.shards
    tokens, total = job.ids.shape[1], job.total
    kv = max(1, config.num_kv_heads // shards)
    part = replace(config, num_heads=config.num_heads // shards, num_kv_heads=kv, num_layers=1)
    layers: list[dict[str, torch.Tensor]] = [{} for _ in range(config.num_layers)]
    for name, value in weights.items():
        if found := re.search(r"\.layers\.(\d+)\.", name):
            layers[int(found[1])][name.replace(found[0], ".layers.0.")] = value
    tied = "model.embed_tokens.table.weight"
    names = {"head": "lm_head.weight" if "lm_head.weight" in weights else tied}
    last = {n: weights[names.get(n, n)] for n in ("head", "model.norm.weight")}
    steps: list[Any] = [
        Layer(part, layers[i], caches[2 * i : 2 * i + 2], total, tokens)
        for i in range(config.num_layers)
    ]
    steps.append(Head(config, last, caches[:1], total, tokens))
    if is_compiled:
        from torch._inductor import select_algorithm  # takes seconds

        select_algorithm.PRINT_AUTOTUNE = False
        steps = [torch.compile(s, mode="max-autotune-no-cudagraphs", dynamic=False) for s in steps]

    def step(ids: torch.Tensor) -> torch.Tensor:
        x = table[ids.long()].to(caches[0].dtype)
        for each in steps:
            x = each(x)
        return x

    return step
