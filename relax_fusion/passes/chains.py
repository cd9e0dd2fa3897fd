"""FuseChains: any chain of matmuls, maps and row reductions becomes one generated kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache, partial
from math import prod

import tvm
from tvm import relax

from ..errors import Decline, Reason
from ..estimator import Choice, Size, choose, predict_unfused, saved_s
from ..estimator.baseline import norm_s
from ..estimator.shape import sizes_of
from ..hardware.target import device_of, is_gpu
from ..matching.chain import PRODUCT, Region, Written, refuse_shared, regions
from ..matching.pattern import BlockView, Match, Refused, guard
from ..workload import Chain, Operand
from ..workload.graph import Tensor
from ..workload.roofline import is_contraction, size_at
from .attention import FuseAttentionChain
from .driver import FusingPass
from .gated_ffn import FuseGatedFFN
from .matmul_chain import FuseMatmulChain
from .options import FuseOptions


@tvm.transform.module_pass(opt_level=0, name="FuseChains")
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
    tiling.  Of the regions that begin with a matmul, the one is taken whose kernel is predicted to
    save the most time.  Two matmuls are left to `FuseMatmulChain` where its kernel saves as much;
    gated layers and attention are left to `FuseGatedFFN` and `FuseAttentionChain`.  What a pass of
    these would take that is switched off is fused here.

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

    def match(self, view: BlockView, var: relax.Var) -> Match | None:
        """Match the best region whose first matmul `var` is."""
        options, is_product = self.options, view.call(var, PRODUCT) is not None
        if not is_product or (options.backend == "tir" and is_gpu(options.resolved_target())):
            return None
        refusal, found = None, []
        for region in self._regions(view, var):
            try:
                candidate = _candidate(region)
                if candidate.match.workload.key not in self.options.disable:
                    found.append(candidate)
            except Refused as err:
                refusal = err
        if found:
            return self._best(view, found)
        if refusal is not None:
            raise refusal
        if not self._is_refused(view, var):
            refuse_shared(view, var)
        return None

    def _is_refused(self, view: BlockView, var: relax.Var) -> bool:
        """Tell whether `FuseMatmulChain` says why it does not take two matmuls."""
        if "FuseMatmulChain" in self.options.disable:
            return False
        try:
            FuseMatmulChain(self.options).match(view, var)
        except Refused:
            return True
        return False

    def _regions(self, view: BlockView, var: relax.Var) -> Iterator[Region]:
        """Yield the regions that are not for the passes of gated layers and of attention."""
        disabled = self.options.disable
        attentions = () if "FuseAttentionChain" in disabled else _attentions(view)
        for region in regions(view, var):
            layers = map(_gated_layers(view), region.covers)
            if any(layer.issuperset(region.reductions) for layer in layers):
                continue
            if not any(taken & region.inside for taken in attentions):
                yield region

    def _best(self, view: BlockView, found: list[_Candidate]) -> Match | None:
        """Return the match that saves the most time; None if the chain of two matmuls does.

        One that is declined would keep its bindings from other regions: it is refused here.
        """
        cuts = _cuts(found)
        keys = self.options.plans.keys()
        planned = [c.match for c in cuts if {c.match.workload.key, type(self).__name__} & keys]
        if planned:
            return planned[0]
        gains = {self._gain(c.match, c, found): c for c in reversed(cuts)}
        most = max(gains)
        best = gains[most]
        for var in best.region.covers:
            two = "FuseMatmulChain" not in self.options.disable
            rival = _match(FuseMatmulChain(self.options), view, var) if two else None
            if rival is not None and self._gain(rival, best, found) >= most:
                return None
        choice = self._choice(best.match)
        if isinstance(choice, Decline):
            refused = Refused(choice.reason, f"{best.match.spelling}: {choice.detail}")
            refused.decline = replace(choice, detail=str(refused))
            raise refused
        if most <= 0 and not self.options.always_fuse:
            norms = ", ".join(v.name for v in best.region.norms)
            detail = f"the kernel saves less time than {norms} takes, which is left in front of it"
            raise Refused(Reason.NOT_PROFITABLE, f"{best.match.spelling}: {detail}")
        return best.match

    def _gain(self, match: Match, candidate: _Candidate, found: list[_Candidate]) -> float:
        """Return the seconds that a kernel is predicted to save in a candidate's place.

        Norms in front of the candidate are kernels of their own then, and else part of a matmul.
        What is a part of it takes no longer in kernels of its own, however both are priced.
        """
        choice, own = self._choice(match), self._choice(candidate.match)
        saved = saved_s(choice)
        is_part = candidate.region.inside.issuperset(match.covers)
        if is_part and isinstance(choice, Choice) and isinstance(own, Choice):
            apart_s, size = own.predictions[-1].unfused.seconds, own.predictions[-1].size
            if candidate.region.out not in match.covers:  # a kernel at least is left behind it
                apart_s -= self._separate_s(candidate.written.graph.outputs[0], candidate, size)
            saved = min(saved, apart_s - choice.predictions[-1].least.seconds)
        if not candidate.region.norms or isinstance(own, Decline):
            return saved
        dev, size = device_of(self.options.resolved_target()), own.predictions[-1].size
        saved -= sum(self._separate_s(tensor, candidate, size) for tensor in candidate.norms)
        whole = next((c for c in found if c.holds(candidate)), None)
        if whole is not None:
            both = [c.match.workload for c in (whole, candidate)]
            with_s, without_s = (
                predict_unfused(w, dev, size, backend=self.options.backend).seconds for w in both
            )
            saved += with_s - without_s
        return saved

    def _separate_s(self, made: Tensor | Operand, candidate: _Candidate, size: Size) -> float:
        """Return what a kernel takes that reads a tensor's rows and makes it of them."""
        sizes = sizes_of(candidate.match.workload, size)
        elements = prod(size_at(dim, sizes) for dim in made.shape or ())
        return norm_s(elements, made.dtype, device_of(self.options.resolved_target()))

    def _choice(self, match: Match) -> Choice | Decline:
        options = self.options
        return choose(
            match.workload,
            device_of(options.resolved_target()),
            always=options.always_fuse,
            backend=options.backend,
            measured=options.measured,
        )


@dataclass(frozen=True)
class _Candidate:
    """A region and what it computes."""

    region: Region
    written: Written

    @property
    def kind(self) -> tuple[int, int]:
        """The numbers of its products and of its other reductions."""
        sums = sum(bool(b.combine) for b in self.written.graph.blocks)
        return len(self.region.products), sums

    def holds(self, other: _Candidate) -> bool:
        """Tell whether it is another candidate with the norms in front."""
        return self.region.out == other.region.out and self.region.inside > other.region.inside

    @property
    def norms(self) -> list[Tensor]:
        """The operands that norms in front make for it alone."""
        found, norms = self.written, self.region.norms
        pairs = zip(found.args, found.graph.inputs, strict=True)
        return [found.graph[operand.name] for arg, operand in pairs if arg.expr in norms]

    @cached_property
    def match(self) -> Match:
        """The region as a match."""
        region, found = self.region, self.written
        work = Chain(found.graph)
        return Match(region.spelling, region.covers, found.args, (found.out,), work)


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


def _match(pattern: FusingPass, view: BlockView, var: relax.Var) -> Match | None:
    try:
        return pattern.match(view, var)
    except Refused:
        return None


def _covered(pattern: FusingPass, view: BlockView, var: relax.Var) -> frozenset[relax.Var]:
    match = _match(pattern, view, var)
    return frozenset(match.covers if match is not None else ())


@lru_cache(maxsize=1)
def _gated_layers(view: BlockView) -> Callable[[relax.Var], frozenset[relax.Var]]:
    """Return a function that tells what the kernel of the gated layer at a variable covers."""
    return cache(partial(_covered, FuseGatedFFN(FuseOptions(bounds=view.bounds)), view))


@lru_cache(maxsize=1)
def _attentions(view: BlockView) -> list[frozenset[relax.Var]]:
    """Return what the kernels of attention cover."""
    pattern = FuseAttentionChain(FuseOptions(bounds=view.bounds))
    found = (_covered(pattern, view, b.var) for b in view.bindings)
    return [covers for covers in found if covers]
