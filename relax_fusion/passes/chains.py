"""FuseChains: any chain of matmuls, maps and row reductions becomes one generated kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from tvm import relax

from ..errors import Reason
from ..estimator import Choice, predict_unfused, saved_s
from ..estimator.baseline import norm_s
from ..estimator.shape import sizes_of
from ..hardware.target import device_of, is_gpu
from ..matching.chain import PRODUCT, Region, Written, refuse_shared, regions
from ..matching.pattern import BlockView, Match, Refused, guard
from ..transforms.modules import module_pass
from ..workload import Chain
from ..workload.graph import Tensor
from ..workload.roofline import is_contraction, size_at
from .driver import FusingPass


@module_pass
class FuseChains(FusingPass):
    """Fuse two or three matmuls with whatever rows go through between, before and behind them.

    rewrite::

        h = R.nn.gelu(R.add(R.matmul(R.nn.layer_norm(x, g, b, -1), w0), b0))
        y = R.add(R.matmul(h, w1), x)
            ->
        y = R.call_tir(fuse_chains_..., (x, g, b, w0, b0, w1))

        t = R.permute_dims(R.nn.layer_norm(x, g, b, -1), [0, 2, 1])     # an MLP-Mixer's tokens
        y = R.permute_dims(R.matmul(R.nn.gelu(R.matmul(t, w0)), w1), [0, 2, 1])
            ->
        y = R.call_tir(fuse_chains_..., (x, g, b, w0, w1))

    A region begins with a matmul, takes what is computed for it alone, and grows along its result:
    functions of elements, sums, means and maxima over rows, softmax, norms, transpositions,
    reshapes that keep rows whole, and further matmuls.  Nothing in it but its result is read
    elsewhere.  It is written down as a block graph, for which the family "generated" searches a
    tiling.  All regions that differ in their matmuls and reductions are proposed.

    declines when:
        an operand of a matmul is a vector, or a weight that the graph decodes; operands are of
        float64, or on several virtual devices; a reshape splits rows; a power is none of 2, 0.5
        and -0.5; no tiling fits the device; the parts alone are predicted to be as fast; on a CPU,
        a tensor is not of float32.  On a GPU only Triton has such kernels: with the back end "tir"
        the pass does nothing there.

    Parameters
    ----------
    options : FuseOptions
        Target, plans, bounds of symbolic variables, and the list that receives decisions.
    """

    def match(self, view: BlockView, var: relax.Var) -> Sequence[Match] | None:
        """Match the regions whose first matmul `var` is."""
        options, is_product = self.options, view.call(var, PRODUCT) is not None
        if not is_product or (options.backend == "tir" and is_gpu(options.resolved_target())):
            return None
        refusal, found = None, list[_Candidate]()
        for region in regions(view, var):
            try:
                found.append(_candidate(region))
            except Refused as err:
                refusal = err
        if not found and refusal is not None:
            raise refusal
        if not found:
            refuse_shared(view, var)
        cuts = _cuts(found)
        if type(self).__name__ in options.plans:
            cuts = cuts[:1]
        return [_ChainMatch.of_candidate(cut, found) for cut in cuts]

    def saved_s(self, match: Match, choice: Choice) -> float:
        """Return the seconds that a kernel is predicted to save in a region's place.

        Norms in front of the region are kernels of their own then, and else part of a matmul.
        """
        saved = saved_s(choice)
        if not isinstance(match, _ChainMatch) or not match.norms:
            return saved
        options = self.options
        dev, size = device_of(options.resolved_target()), choice.predictions[-1].size
        sizes = sizes_of(match.workload, size)
        for norm in match.norms:
            elements = prod(size_at(dim, sizes) for dim in norm.shape or ())
            saved -= norm_s(elements, norm.dtype, dev)
        if match.whole is not None:
            with_s, without_s = (
                predict_unfused(work, dev, size, backend=options.backend).seconds
                for work in (match.whole, match.workload)
            )
            saved += with_s - without_s
        if saved <= 0 and not options.always_fuse and match.workload.key not in options.plans:
            names = ", ".join(norm.name for norm in match.norms)
            detail = f"the kernel saves less time than {names} takes, which is left in front of it"
            raise Refused(Reason.NOT_PROFITABLE, detail)
        return saved


@dataclass(frozen=True)
class _Candidate:
    """A region and what it computes."""

    region: Region
    written: Written

    @cached_property
    def work(self) -> Chain:
        """What its kernel computes."""
        return Chain(self.written.graph)

    @property
    def kind(self) -> tuple[int, int]:
        """The numbers of its products and of its other reductions."""
        sums = sum(bool(b.combine) for b in self.written.graph.blocks)
        return len(self.region.products), sums

    def holds(self, other: _Candidate) -> bool:
        """Tell whether it is another candidate with the norms in front."""
        return self.region.out == other.region.out and self.region.inside > other.region.inside


@dataclass(frozen=True)
class _ChainMatch(Match):
    """A region as a match."""

    norms: tuple[Tensor, ...] = ()  # the operands that norms in front make for it alone
    whole: Chain | None = None  # what a region with the norms in front computes

    @staticmethod
    def of_candidate(candidate: _Candidate, found: Sequence[_Candidate]) -> _ChainMatch:
        """Return the match of a candidate among others that begin with the same matmul."""
        region, written = candidate.region, candidate.written
        pairs = zip(written.args, written.graph.inputs, strict=True)
        norms = tuple(written.graph[o.name] for arg, o in pairs if arg.expr in region.norms)
        whole = next((c.work for c in found if c.holds(candidate)), None)
        kernel = region.spelling, region.covers, written.args, (written.out,), candidate.work
        return _ChainMatch(*kernel, norms=norms, whole=whole)


def _candidate(region: Region) -> _Candidate:
    found = region.written()
    products = sum(map(is_contraction, found.graph.blocks))
    detail = f"{products} of {len(region.products)} matmuls have several rows; two must"
    guard(products > 1, Reason.SHAPE, detail)
    return _Candidate(region, found)


def _cuts(found: list[_Candidate]) -> list[_Candidate]:
    """Return the candidates that differ in their reductions, the largest first.

    Of those that differ only in functions of elements, the last does the most with what it has.
    """
    return list(reversed({c.kind: c for c in found}.values()))
