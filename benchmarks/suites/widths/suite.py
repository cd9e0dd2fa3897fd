r"""Chains of the widths of seventeen models on an NVIDIA GPU: ours, cuBLAS, PyTorch, in one run.

    python -m benchmarks run widths                               # a sample; minutes
    python -m benchmarks run widths --seed 1 --count 1105         # all of them
    python -m benchmarks run widths --models vit-l --cases up --rows 1 777 --contenders ours compile
    python -m benchmarks run widths --resume DATE-bench_widths.json --count 40 --contenders ours \
        cublas eager compile --seconds 500                        # some of these, torch.compile too
    python -m benchmarks plot DATE-bench_widths.json              # the heat maps, without a GPU

Of each model: norm and qkv, norm and gate/up with their product (without a gate: up and its
activation), the projections with their residuals, and the matmul of qkv alone; with biases,
activations, `1 + gamma` and layouts as the models have them.  Ours are compiled once for all rows,
with weights as parameters.  "cublas" is the bare matmul, gate and up in one; "compile",
torch.compile, takes long, and is timed if asked for.  Everything is captured into CUDA graphs and
timed in turn, L2 flushed before each sample, and compared with float64; the exit status is 1 if
one of ours is wrong or fails.
"""

from __future__ import annotations

from argparse import ArgumentParser
from pathlib import Path
from typing import ClassVar

from benchmarks.arguments import at_least
from benchmarks.report import Entry, Verdict
from benchmarks.suite import Suite
from benchmarks.suites.matmul.models import MODELS
from benchmarks.suites.matmul.suite import Matmul
from benchmarks.suites.widths import heat_maps, report
from benchmarks.suites.widths.sampling import CASES, ROWS, Grid, Item


class Widths(Matmul):
    """A sample of chains of models, each at some numbers of rows."""

    name = "bench_widths"
    cases = CASES
    contenders = ("ours", *report.PEERS)
    usual = ("ours", "cublas", "eager")
    ours = ("ours",)
    plain: ClassVar = {"dtype": "float16"}
    kind, stem = Suite.kind, Suite.stem

    @classmethod
    def options(cls, parser: ArgumentParser) -> None:
        add = parser.add_argument
        add("--models", nargs="+", default=list(MODELS), choices=MODELS)
        add("--rows", type=at_least(1), nargs="+", default=list(ROWS))
        add("--seed", type=int, default=0, help="of the sample")
        cells = "how many to measure (default: one for each model at each number of rows)"
        add("--count", type=at_least(1), metavar="M", help=cells)
        parser.set_defaults(static=False, no_compile=False, tvm_rows=(), quantization="")

    def items(self) -> list[Item]:
        args = self.args
        return Grid(args.models, args.cases, args.rows).sample(args.seed, args.count)

    def facts(self, item: Item) -> Entry:
        return {**super().facts(item), "seed": self.args.seed}

    def markdown(self, record: Entry) -> str:
        return report.markdown(record)

    def summary(self, record: Entry) -> str:
        return report.summary(record)

    def goals(self, entry: Entry, record: Entry) -> list[Verdict]:
        return []

    def plot(self, record: Entry, path: Path) -> None:
        heat_maps.plot(record, path)
