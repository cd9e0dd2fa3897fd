"""PyTorch's operators on integers, booleans and several dtypes, imported: dtypes and numbers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import tvm
from tvm.relax.frontend import torch as tvm_importer

from relax_fusion.frontends.torch import from_exported_program

from ..support.quick import machine, quickly

GIVEN = {
    "i": torch.tensor([-7, -3, -1, 0, 1, 2, 5, 8]),
    "j": torch.tensor([2, -2, 3, 5, -4, 7, 3, -3]),
    "n": torch.tensor([1, 2, 3, 4, 5, 6, 7, 8], dtype=torch.int32),
    "b": torch.tensor([True, False] * 4),
    "c": torch.tensor([True, True, False, False] * 2),
    "f": torch.tensor([-2.5, -1.0, -0.5, 0.0, 0.5, 1.5, 2.5, 3.0]),
    "h": torch.tensor([-2.5, -1.0, -0.5, 0.0, 0.5, 1.5, 2.5, 3.0], dtype=torch.float16),
}
Operator = Callable[..., torch.Tensor]
OPERATORS: list[Operator] = [
    lambda i, j, **_: i / j,
    lambda i, **_: i / 3,
    lambda n, **_: 3 / n,
    lambda b, **_: b / 2,
    lambda n, j, **_: n / j,
    lambda i, **_: i // 3,
    lambda i, **_: i // -3,
    lambda i, **_: i // 2.5,
    lambda i, **_: torch.div(i, 3, rounding_mode="trunc"),
    lambda i, j, **_: i % j,
    lambda i, **_: i % 2.5,
    lambda j, **_: torch.remainder(7, j),
    lambda i, **_: i * 0.5,
    lambda i, **_: 0.5 - i,
    lambda i, h, **_: i * h,
    lambda f, h, **_: f * h,
    lambda h, **_: h * torch.tensor(2.5),
    lambda i, j, **_: torch.add(i, j, alpha=2),
    lambda f, i, **_: torch.sub(f, i, alpha=2),
    lambda b, **_: b + 1,
    lambda b, c, **_: b + c,
    lambda b, c, **_: b * c,
    lambda b, f, **_: b * f,
    lambda i, **_: i < 0.5,
    lambda i, f, **_: i <= f,
    lambda b, **_: b == 1,
    lambda n, **_: torch.exp(-n),
    lambda n, **_: torch.log(n),
    lambda n, **_: torch.rsqrt(n),
    lambda i, **_: torch.sigmoid(i),
    lambda b, **_: torch.cos(b),
    lambda n, **_: n**0.5,
    lambda n, **_: n**-1.0,
    lambda n, **_: 2**n,
    lambda n, **_: 2.0**n,
    lambda i, **_: i.clamp(min=-2),
    lambda i, **_: i.clamp(0.5, 2.5),
    lambda n, **_: n.sum(),
    lambda b, **_: b.cumsum(0),
    lambda i, **_: i.view(2, 4).mean(1, dtype=torch.float32),
    lambda i, **_: i.any(),
    lambda i, **_: i.view(2, 4).any(-1, keepdim=True),
    lambda f, **_: f.view(2, 4).amax(1),
    lambda f, **_: torch.logsumexp(f, 0),
    lambda f, **_: torch.topk(f, 3, sorted=False)[0].sort()[0],
    lambda n, **_: n << 2,
    lambda i, **_: i >> 1,
    lambda i, j, **_: torch.logical_and(i, j),
    lambda b, i, f, **_: torch.where(b, i, f),
    lambda b, i, **_: torch.where(b, i, 0.5),
    lambda i, f, **_: torch.cat([i, f]),
    lambda i, **_: torch.ones_like(i, dtype=torch.float32) * 0.5,
    lambda i, j, **_: i.view(2, 4) @ j.view(4, 2),
]


class All(torch.nn.Module):
    def forward(self, *args: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = dict(zip(GIVEN, args, strict=True))
        return tuple(made(**given) for made in OPERATORS)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_operators() -> None:
    args = tuple(GIVEN.values())
    mod = from_exported_program(torch.export.export(All(), args))
    built = quickly(mod, "default")
    got = machine(built)["main"](*(tvm.runtime.tensor(a.numpy()) for a in args))
    for number, (made, wanted) in enumerate(zip(got, All()(*args), strict=True)):
        found, exact = made.numpy(), wanted.numpy()
        assert found.dtype == exact.dtype, f"operator {number}"
        error = f"operator {number}"
        np.testing.assert_allclose(found, exact, rtol=1e-5, atol=1e-6, err_msg=error)


class Half(torch.nn.Module):
    def forward(self, i: torch.Tensor) -> torch.Tensor:
        return i < 0.5


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_tvm_needs_it() -> None:
    program = torch.export.export(Half(), (GIVEN["i"],))
    mod = tvm_importer.from_exported_program(program, unwrap_unit_return_tuple=True)
    found = machine(quickly(mod, "default"))["main"](tvm.runtime.tensor(GIVEN["i"].numpy()))
    same = np.array_equal(found.numpy(), GIVEN["i"].numpy() < 0.5)
    assert not same, "TVM's importer compares so itself now: see what of promotion.py may go"
