"""The attentions that benchmarks measure: sizes, masks, least traffic and work, targets."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import dataclass

from benchmarks.targets import Target, floor_us
from relax_fusion.workload import Attention, Dim
from relax_fusion.workload.roofline import matmul_flops

SOFTCAP = 50.0
WINDOW = 512
MASKS = ("bias", "alibi", "softcap", "window")
SDPA = ("flash", "cudnn")
"""The back ends of `torch.nn.functional.scaled_dot_product_attention` to be beaten."""

CONTENDERS = ("ours", *SDPA, "flex", "compile")
DTYPES = ("float16", "bfloat16")

_EVERY_HEAD = (False, True, True, True)


@dataclass(frozen=True)
class Case:
    """One attention.

    Parameters
    ----------
    name, group : str
        How it is called, and what its targets go by.
    heads : tuple of int
        Of queries, and of keys and values, which divide them.
    lengths : tuple of int
        Queries and keys of a sequence.
    head_dim : int
        Features of a head.
    batch : int
        Sequences.
    causal : bool
        Whether a query sees the keys up to its own position; the last query is at the last key.
    mask : str
        One of `MASKS`: an additive bias ``[1, heads, queries, keys]``, slopes of ALiBi, scores
        capped by tanh at `SOFTCAP`, a sliding window of `WINDOW` keys.  Empty: none.
    """

    name: str
    group: str
    heads: tuple[int, int]
    lengths: tuple[int, int]
    head_dim: int
    batch: int = 1
    causal: bool = False
    mask: str = ""

    @property
    def scale(self) -> float:
        """What scores are multiplied by."""
        return self.head_dim**-0.5

    def work(self, lengths: tuple[Dim, Dim, Dim], dtype: str) -> Attention:
        """Return the workload at a batch and numbers of queries and keys; tensors are "bsnh"."""
        return Attention(
            *(*lengths, *self.heads, self.head_dim, self.head_dim, self.scale),
            causal="bottom_right" if self.causal else "none",
            bias_dims=_EVERY_HEAD if self.mask == "bias" else None,
            dtype=dtype,
            out_dtype=dtype,
            bias_dtype=dtype if self.mask == "bias" else "float32",
            mask_dims=_EVERY_HEAD if self.mask == "where" else None,
            window=WINDOW if self.mask == "window" else None,
            softcap=SOFTCAP if self.mask == "softcap" else None,
            alibi="float32" if self.mask == "alibi" else None,
        )

    def _in_half(self) -> Attention:
        return self.work((self.batch, *self.lengths), "float16")

    @property
    def flops(self) -> float:
        """Operations of both matmuls on what is visible."""
        return matmul_flops(self._in_half().graph, {}, visible=True)

    @property
    def kv_bytes(self) -> int:
        """Keys and values, in half precision."""
        moved = self._in_half().bytes()
        return moved["k"] + moved["v"]

    @property
    def bytes(self) -> int:
        """Least traffic: every operand and the result once, in half precision."""
        return sum(self._in_half().bytes().values())

    def floor_us(self, copy_tb_s: float) -> float:
        """Least time in us at the measured bandwidth (TB/s) of a copy, without launching."""
        return floor_us(self.bytes, self.flops, copy_tb_s)


def _short() -> Iterable[Case]:
    """Yield the self-attentions S1 to S9 of MCFuser (Zhang et al., SC 2024)."""
    sizes = (
        *((heads, 512, 512, 64) for heads in (8, 12, 16)),
        *((12, 256, 256, 64), (16, 256, 256, 64), (16, 256, 256, 80)),
        *((1, 512, 256, 64), (1, 768, 384, 64), (1, 1024, 512, 64)),
    )
    for i, (heads, queries, keys, head_dim) in enumerate(sizes, start=1):
        yield Case(f"S{i}", "short", (heads, heads), (queries, keys), head_dim)


def _llama() -> Iterable[Case]:
    heads, head_dim = (32, 8), 128
    for batch in (1, 4, 16, 64):
        for k in (1, 4, 8, 32):
            name = f"decode-b{batch}-{k}k"
            yield Case(name, "decode", heads, (1, 1024 * k), head_dim, batch)
    for n in (2048, 8192, 32768, 512):
        yield Case(f"prefill-{n}", "prefill", heads, (n, n), head_dim, causal=True)
    yield Case("bias-2048", "mask", heads, (2048, 2048), head_dim, mask="bias")
    for mask in ("alibi", "softcap", "window"):
        for n in (2048, 8192):
            yield Case(f"{mask}-{n}", "mask", heads, (n, n), head_dim, causal=True, mask=mask)


def _others() -> Iterable[Case]:
    for model, heads in (("base", 12), ("large", 16)):
        for batch in (1, 8, 32):
            yield Case(f"bert-{model}-b{batch}", "bert", (heads, heads), (512, 512), 64, batch)
    for head_dim in (64, 72, 80, 96, 128, 160, 256):
        yield Case(f"d{head_dim}", "head_dim", (16, 16), (2048, 2048), head_dim)
    for model, heads, head_dim in (("base", 12, 64), ("large", 16, 64), ("huge", 16, 80)):
        length = 257 if model == "huge" else 197
        for batch in (1, 32):
            name = f"vit-{model}-b{batch}"
            yield Case(name, "vit", (heads, heads), (length, length), head_dim, batch)
    for batch in (1, 32):
        yield Case(f"clip-b{batch}", "clip", (12, 12), (77, 77), 64, batch, causal=True)
    yield Case("gpt2-1024", "gpt2", (12, 12), (1024, 1024), 64, causal=True)
    for batch in (1, 16):
        yield Case(f"gpt2-decode-b{batch}", "gpt2", (12, 12), (1, 1024), 64, batch)


CASES = {case.name: case for case in (*_short(), *_llama(), *_others())}
"""Important ones first."""

GROUPS = tuple(dict.fromkeys(case.group for case in CASES.values()))


def selected(names: Iterable[str]) -> list[Case]:
    """Return the cases that `names`, groups and single cases, stand for, each once.

    Raises
    ------
    ValueError
        If a name is neither.
    """
    found: dict[str, Case] = {}
    for name in names:
        if name not in GROUPS and name not in CASES:
            raise ValueError(f"{name!r} is no group ({', '.join(GROUPS)}) and no case")
        found |= {n: c for n, c in CASES.items() if name in (n, c.group)}
    return list(found.values())


def add_cases(parser: argparse.ArgumentParser, default: Iterable[str]) -> None:
    """Add the option ``--cases``, whose value `selected_by` reads."""
    names = f"groups ({', '.join(GROUPS)}) and single cases ({', '.join(CASES)})"
    parser.add_argument("--cases", nargs="+", default=list(default), metavar="NAME", help=names)


def selected_by(parser: argparse.ArgumentParser, names: Iterable[str]) -> list[Case]:
    """Return the cases that a command line names; end with its usage if one is unknown."""
    try:
        return selected(names)
    except ValueError as err:
        parser.error(f"--cases: {err}")


GROUP_TARGETS = {"short": Target("sdpa", 1.3), "decode": Target("sdpa", 1.25)}
"""What the geometric mean over a group is to reach, on an H200."""

_COPY_PART, _COPY_BYTES = 0.85, 100e6
_PREFILL = {2048, 8192, 32768}


def targets(case: Case) -> list[Target]:
    """Return what `case` alone is to reach, on an H200."""
    found = [Target("flex", 1.15 if case.group == "mask" else 1.0)]
    if case.group == "decode" and case.kv_bytes > _COPY_BYTES:
        found.append(Target("copy", _COPY_PART))
    if case.group == "prefill" and case.lengths[0] in _PREFILL:
        found += [Target("cudnn", 0.8), Target("flash", 1.4)]
    return found
