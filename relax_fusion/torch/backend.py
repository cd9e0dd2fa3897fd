"""The backend of ``torch.compile``: from Dynamo's graphs to compiled pieces."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._guards import TracingContext
from torch.fx import GraphModule
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import _disable_current_modes

from ..errors import PipelineError, RelaxFusionError, TargetError, warn
from ..frontends.experts import in_token_order
from ..frontends.promotion import written_out
from ..validation import reason
from .check import Checked
from .decompositions import decompositions, repeat_pixels
from .fingerprint import fingerprint
from .library_cache import LibraryCache
from .messages import LOG, check_strict, tell
from .options import TorchOptions, options_of
from .program import Program
from .split import cut
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
    tensors = [each for each in example_inputs if isinstance(each, torch.Tensor)]
    if torch.is_grad_enabled() and any(each.requires_grad for each in tensors):
        within = "call the model within torch.no_grad() or torch.inference_mode()"
        if options.strict:
            raise RelaxFusionError(f"strict=True, and a graph needs gradients; {within}")
        text = f"relax_fusion: a graph needs gradients and runs in PyTorch; {within}"
        warn(text)
        return module.forward
    repeat_pixels(module)
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
            warn(text)
            return _boxed(module)


def compile_graph(
    module: GraphModule, inputs: Sequence[Any], options: TorchOptions
) -> Callable[[list[Any]], Any]:
    """Compile a functional graph of ATen operators.

    Returns what takes the arguments as one list, which it empties.

    `module`: the graph; it is changed.
    `inputs`: its arguments.
    Raises `RelaxFusionError` if `options` are strict, and an operator stays in PyTorch.  Raises
    `TargetError` if the target is for another device than the inputs.
    """
    start = time.perf_counter()
    device = _device_of(inputs)
    context = getattr(TracingContext.try_get(), "fw_metadata", None)
    weights = set(context.static_input_indices) if context is not None else set[int]()
    write_in_place(module)
    in_token_order(module)
    written_out(module)
    key = fingerprint(module, weights, options, options.compiled_for(device))
    cache = LibraryCache(device) if options.cache and not options.dryrun else None
    found = None if cache is None else cache.get(key, module)
    if found is None:
        from .pieces import compile_pieces  # imports TVM

        target = options.target_for(device)
        record, made = compile_pieces(module, device, weights, options, target)
        kept = [] if cache is None else cache.put(key, record, made)
        libraries = kept or [each.jit() for each in made if each is not None]
    else:
        record, libraries = found
        check_strict(options, record.left)
    names = [] if options.dryrun else cut(module, record.operators)
    for name, piece, library in zip(names, record.pieces, libraries, strict=False):
        eager = module.get_submodule(name)
        uses = results_of(module, name, piece.inputs)
        program = Program(piece, library, device, uses, eager, replay=options.use_cuda_graph)
        delattr(module, name)  # a submodule; what takes its place is none
        called = Checked(name, program, eager) if options.check else program
        object.__setattr__(module, name, called)
    how = "compiled" if found is None else "taken from the cache"
    how = "looked at (dryrun), and will run in PyTorch," if options.dryrun else how
    tell(key, options, record, f"{how} in {time.perf_counter() - start:.1f} s")
    return _boxed(module)


def _boxed(module: GraphModule) -> Callable[[list[Any]], Any]:
    module.recompile()

    forward = module.forward

    def run(args: list[Any]) -> Any:
        taken = tuple(args)
        args.clear()
        return forward(*taken)

    run._boxed_call = True  # type: ignore[attr-defined]  # what AOTAutograd asks for
    return run


def _device_of(inputs: Sequence[Any]) -> torch.device:
    devices = [each.device for each in inputs if isinstance(each, torch.Tensor)]
    return next(
        (d for d in devices if d.type != "cpu"), devices[0] if devices else torch.device("cpu")
    )
