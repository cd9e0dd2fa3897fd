"""The backend of ``torch.compile``: from Dynamo's graphs to compiled pieces."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._guards import TracingContext
from torch.fx import GraphModule
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import _disable_current_modes
from tvm.target import Target

from ..entry import build, partition
from ..errors import PipelineError, RelaxFusionError, TargetError
from ..frontends.imported import reason, with_clipped_indices
from ..frontends.promotion import written_out
from ..report import Report
from .check import Checked
from .decompositions import decompositions
from .fingerprint import fingerprint
from .graph import import_graph, refusals
from .library_cache import LibraryCache
from .messages import LOG, Told
from .options import TorchOptions, options_of
from .program import Program
from .record import GraphRecord, PieceRecord
from .split import split
from .writes import results_of, write_in_place


def relax_fusion(
    module: GraphModule, example_inputs: Sequence[Any], **kwargs: Any
) -> Callable[..., Any]:
    """Compile a graph that Dynamo captured; what ``torch.compile(backend="relax_fusion")`` calls.

    Parameters
    ----------
    module : torch.fx.GraphModule
        The graph.
    example_inputs : sequence
        Its arguments: tensors, fake or real, and sizes.
    **kwargs
        ``options``, a mapping or `TorchOptions`; ``mode`` is not taken.

    Returns
    -------
    callable
        Takes what the graph takes.

    Raises
    ------
    PipelineError
        If an option is unknown, or has a value that it cannot have.
    """
    if kwargs.get("mode") is not None:
        text = f"backend 'relax_fusion' has no mode {kwargs['mode']!r}; pass options instead"
        raise RelaxFusionError(text)
    options = options_of(kwargs.get("options"))
    if _needs_gradients(example_inputs):
        warnings.warn(
            "relax_fusion: a graph needs gradients and runs in PyTorch; call the model within "
            "torch.no_grad() or torch.inference_mode()",
            stacklevel=2,
        )
        return module.forward
    compiler = aot_autograd(
        fw_compiler=lambda graph, inputs: _without_modes(graph, inputs, options),
        decompositions=decompositions(),
        keep_inference_input_mutations=True,
    )
    with sdpa_kernel(SDPBackend.MATH):
        return compiler(module, example_inputs)


def _without_modes(
    module: GraphModule, inputs: Sequence[Any], options: TorchOptions
) -> Callable[[list[Any]], Any]:
    """Compile a graph where tensors that are a part of it can be read."""
    with _disable_current_modes():
        try:
            return compile_graph(module, inputs, options)
        except Exception as err:  # PyTorch can run every graph
            if options.strict or isinstance(err, PipelineError | TargetError):
                raise
            LOG.debug("a graph cannot be compiled", exc_info=True)
            text = f"relax_fusion: a graph stays in PyTorch, it cannot be compiled: {reason(err)}"
            warnings.warn(text, RuntimeWarning, stacklevel=2)
            return _boxed(module)


def _needs_gradients(inputs: Sequence[Any]) -> bool:
    return torch.is_grad_enabled() and any(
        isinstance(each, torch.Tensor) and each.requires_grad for each in inputs
    )


def compile_graph(
    module: GraphModule, inputs: Sequence[Any], options: TorchOptions
) -> Callable[[list[Any]], Any]:
    """Compile a functional graph of ATen operators.

    Parameters
    ----------
    module : torch.fx.GraphModule
        The graph; it is changed.
    inputs : sequence
        Its arguments.
    options : TorchOptions
        How it is compiled.

    Returns
    -------
    callable
        Takes the arguments as one list, which it empties.

    Raises
    ------
    RelaxFusionError
        If `options` are strict, and an operator stays in PyTorch.
    TargetError
        If the target is for another device than the inputs.
    """
    start = time.perf_counter()
    device = _device_of(inputs)
    target = options.target_for(device)
    weights = _static_arguments()
    write_in_place(module)
    written_out(module)
    key = fingerprint(module, weights, options, str(target))
    cache = LibraryCache() if options.cache and not options.dryrun else None
    found = cache.get(key) if cache is not None else None
    refused = found[0].refusals if found is not None else _refused(module)
    nodes = {n: refused[n.name] for n in module.graph.nodes if n.name in refused}
    names, left = split(module, device, nodes, options.min_block_size)
    told = Told(key, options)
    told.pieces(names, left)
    if found is None:
        made = [_made(module, name, weights, target, options, told) for name in names]
        record = GraphRecord(
            refused, tuple(each.record for each in made), tuple(each.verdict for each in made)
        )
        libraries = [each.executable for each in made if each.record is not None]
        if cache is not None:
            cache.put(key, record, libraries)
    else:
        record, libraries = found
        for verdict in record.verdicts:
            told.recall(verdict)
    ready = iter(libraries)
    for name, piece in zip(names, record.pieces, strict=True):
        if piece is not None:
            eager = module.get_submodule(name)
            uses = results_of(module, name, piece.inputs)
            replay = options.use_cuda_graph
            program = Program(piece, next(ready), device, uses, eager, replay=replay)
            _replace(module, name, Checked(name, program, eager) if options.check else program)
    told.ready(time.perf_counter() - start, cached=found is not None)
    return _boxed(module)


@dataclass(frozen=True)
class _Made:
    """A piece that was compiled, or not."""

    verdict: str
    record: PieceRecord | None = None
    executable: Any = None


def _made(
    module: GraphModule,
    name: str,
    weights: set[int],
    target: Target,
    options: TorchOptions,
    told: Told,
) -> _Made:
    """Compile a piece of a graph; where that fails it stays in PyTorch, and a warning names it."""
    arguments = [node for node in module.graph.nodes if node.op == "placeholder"]
    (call,) = module.graph.find_nodes(op="call_module", target=name)
    fixed = {arguments[n] for n in weights}
    report = Report()
    try:
        piece = cast("GraphModule", module.get_submodule(name))
        mod, record = import_graph(piece, lambda n: call.args[n] in fixed)
        mod = with_clipped_indices(mod)
        if options.dryrun:
            partition(mod, target, report=report, **options.pipeline(target))
            return _Made(told.verdict(name, report))
        executable = build(mod, target, report=report, **options.pipeline(target))
    except Exception as err:  # whatever stands in the way, PyTorch can run the piece
        if options.strict:
            raise RelaxFusionError(f"{name} cannot be compiled: {reason(err)}") from err
        LOG.debug("%s cannot be compiled", name, exc_info=True)
        text = f"relax_fusion: {name} stays in PyTorch, it cannot be compiled: {reason(err)}"
        warnings.warn(text, RuntimeWarning, stacklevel=2)
        return _Made(told.recall(f"  {name}: stays in PyTorch: {reason(err)}\n"))
    return _Made(told.verdict(name, report), record, executable)


def _refused(module: GraphModule) -> dict[str, str]:
    return {node.name: why for node, why in refusals(module).items()}


def _replace(module: GraphModule, name: str, program: Callable[..., Any]) -> None:
    """Let calls of a submodule call a program."""
    delattr(module, name)
    object.__setattr__(module, name, program)


def _boxed(module: GraphModule) -> Callable[[list[Any]], Any]:
    module.recompile()

    forward = module.forward

    def run(args: list[Any]) -> Any:
        taken = tuple(args)
        args.clear()
        return forward(*taken)

    run._boxed_call = True  # type: ignore[attr-defined]  # what AOTAutograd asks for
    return run


def _static_arguments() -> set[int]:
    """Return which arguments are parameters or buffers of the model."""
    context = TracingContext.try_get()
    meta = context.fw_metadata if context is not None else None
    return set(meta.static_input_indices) if meta is not None else set()


def _device_of(inputs: Sequence[Any]) -> torch.device:
    devices = [each.device for each in inputs if isinstance(each, torch.Tensor)]
    return next(
        (d for d in devices if d.type != "cpu"), devices[0] if devices else torch.device("cpu")
    )
