"""Operators whose numbers TVM computes otherwise than PyTorch, compiled by themselves."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import Tensor  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from ..support.slow import quick_if  # noqa: E402

NAN, INF = float("nan"), float("inf")
HALVES = quick_if(lambda dtype: dtype is torch.bfloat16, (torch.float16, torch.bfloat16))
FLOATS = (torch.float32, *HALVES, torch.float64)
Operator = Callable[..., Any]

SPECIAL: tuple[Operator, ...] = (
    lambda x, y: x.relu(),
    lambda x, y: F.hardtanh(x, -1.5, 2.5),
    lambda x, y: x.clamp(min=0.5),
    lambda x, y: x.clamp(y, 3 * y),
    torch.maximum,
    torch.minimum,
    lambda x, y: x.amax(-1),
    lambda x, y: x.amin((0, 1), keepdim=True),
    lambda x, y: x.max(),
    lambda x, y: x.max(-1)[1],
    lambda x, y: x.min(0, keepdim=True)[0],
    lambda x, y: torch.exp(x).argmax(-1),
    lambda x, y: x.argmin(),
    lambda x, y: x.double().argmax(0, keepdim=True),
    lambda x, y: x.sort(dim=-1, stable=True)[0],
    lambda x, y: x.argsort(0, descending=True),
    lambda x, y: x != x,
    lambda x, y: x.isnan(),
    lambda x, y: x <= x,
    lambda x, y: x - x,
    lambda x, y: x * 0.0,
    lambda x, y: F.softmax(x, -1),
)
SUMS: tuple[Operator, ...] = (
    lambda x: x.sum(-1),
    lambda x: (x * x).sum(),
    lambda x: x.mean(-1),
    lambda x: x.var(-1),
    lambda x: x.std(0),
    lambda x: x.norm(dim=-1),
    lambda x: x.prod(0),
    lambda x: (x / 64).cumsum(-1),
    lambda x: F.softmax(x, -1) * 4096,
    lambda x: F.log_softmax(x, -1),
    lambda x: F.layer_norm(x, x.shape[-1:]),
    lambda x: F.batch_norm(x.T, x[:, 0], x[:, 1]),
)
IN_FLOAT32 = ["acos", "asin", "asinh", "atan", "atanh", "cosh", "sinh", "tan", "exp", "erf"]
DTYPES: dict[str, tuple[Operator, Any]] = {
    "bytes": (
        lambda x: (x + -3, x * -1, x < -3, x.clamp(-3, 5), x.argmax(), -x, x.sort()[0]),
        b"\1\0\372",
    ),
    "no byte": (lambda x: (x.argmax(), x.argmin()), b"\0\0"),
    "booleans": (
        lambda x: (x.amax(), x.amin(), torch.maximum(x, ~x), x.isnan(), x & x.any()),
        [True, False],
    ),
    "integers": (lambda x: (x.clamp(x.amin(), x.amax() - 1), x.argmax()), [3, -(2**63), 5]),
    "numbers": (lambda x: (x.argmax(), x.amax(), x.relu()), 2.0),
    "scales": (lambda x: (F.selu(x), F.celu(x, 0.5), F.elu(x, 2)), [-1.5, -1e-4, 0.0, NAN, INF]),
    "rests": (
        lambda x: (x % 2.5, x // 0.25, torch.div(-5.0, x, rounding_mode="floor")),
        [-7.25, INF, 0.0],
    ),
    "batches": (lambda x: F.batch_norm(x, None, None, training=True), [[1.0, 3.0], [2.0, 5.0]]),
    "rows": (lambda x: F.rms_norm(x, x.shape), [1.0, 2.0, 4.0]),
}


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    torch.manual_seed(0)


def agree(operators: tuple[Operator, ...], *args: Tensor, **tolerances: float) -> None:
    """Compile operators as one graph, none of which may stay in PyTorch, and compare."""

    def every(*given: Tensor) -> list[Tensor]:
        return [operator(*given) for operator in operators]

    how = {"strict": True, "min_block_size": 1, "cache": False}
    with torch.no_grad():
        found = torch.compile(every, backend="relax_fusion", options=how)(*args)
        torch.testing.assert_close(found, every(*args), equal_nan=True, **tolerances)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_nan_and_infinities_are_kept(dtype: torch.dtype) -> None:
    x = torch.tensor([[NAN, 1, -INF, INF, -2, 0], [-INF] * 6, [3, NAN, 2, NAN, -0.0, 5]])
    y = torch.tensor([[1, NAN, -1, NAN, -3, 0.0], [INF] * 6, [0.5] * 6])
    pools = () if dtype == torch.float64 else (lambda x, y: F.max_pool2d(x[None], 2, 1),)
    agree(SPECIAL + pools, x.to(dtype), y.to(dtype))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_halves_are_added_up_in_float32(dtype: torch.dtype) -> None:
    agree(SUMS, 1 + torch.rand(3, 5000).to(dtype) / 8)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_functions_of_halves(dtype: torch.dtype) -> None:
    operators = tuple(getattr(torch, name) for name in IN_FLOAT32)
    agree((*operators, lambda x: torch.atan2(x, -x)), torch.tensor([0.25, 0.5, 1]).to(dtype))


@pytest.mark.parametrize("name", DTYPES)
def test_dtypes_that_tvm_has_less_of(name: str) -> None:
    function, values = DTYPES[name]
    x = (
        torch.frombuffer(bytearray(values), dtype=torch.uint8)
        if isinstance(values, bytes)
        else values
    )
    agree((function,), torch.as_tensor(x))


@pytest.mark.parametrize(
    ("operator", "x", "why"),
    [
        (lambda x: F.max_pool2d(x, 2), torch.arange(8).view(2, 2, 2), "takes floats only"),
        (lambda x: x.cumsum(0), torch.tensor(2.0), "takes no number"),
        (lambda x: x.median(), torch.tensor([1, NAN]), "gives NaN where one is"),
        (lambda x: x.clamp(min=~x), torch.tensor([True, False]), "takes no booleans"),
        (lambda x: F.conv_transpose2d(x, x), torch.ones(1, 1, 3, 3), "faster in PyTorch"),
        (lambda x: F.conv2d(x, x[:, :2], groups=2), torch.ones(4, 4, 3, 3), "faster in PyTorch"),
        (lambda x: F.conv1d(x, x[..., :2], dilation=2), torch.ones(2, 2, 5), "faster in PyTorch"),
    ],
    ids=("pools", "sums", "medians", "clamps", "transposed", "groups", "dilated"),
)
def test_what_tvm_does_badly_stays_in_pytorch(operator, x, why, caplog) -> None:
    caplog.set_level(logging.INFO, "relax_fusion.torch")
    with torch.no_grad():
        found = torch.compile(operator, backend="relax_fusion", options={"min_block_size": 1})(x)
    torch.testing.assert_close(found, operator(x), equal_nan=True)
    assert why in caplog.text
