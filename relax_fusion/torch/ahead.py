"""A model compiled ahead of time: called with tensors of PyTorch, kept in a directory."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
import tvm
from safetensors.torch import load_file, save_file
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import GraphModule, Node
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree

from ..entry import build
from ..errors import ModelFileError, PipelineError, RelaxFusionError
from ..files import read_file
from ..frontends.imported import with_clipped_indices
from ..frontends.promotion import written_out
from ..report import Report
from ..validation import Natural, read
from .decompositions import decompositions
from .graph import import_graph, refusals
from .options import TorchOptions, options_of
from .program import Program
from .record import PieceRecord, piece_record, tuples
from .writes import write_in_place

_aten = torch.ops.aten

VERSION = 1
"""The version of the files that `Compiled.save` writes."""

MANIFEST, LIBRARY, WEIGHTS = "model.json", "model.so", "weights.safetensors"
"""The names of those files."""


@dataclass(frozen=True)
class Interface:
    """How a compiled model is called from outside.

    Parameters
    ----------
    device : str
        Where its tensors are.
    held : tuple of str
        The names of the weights and buffers that are the first arguments of the graph.
    inputs, outputs : str
        How the other arguments and the results are nested, as PyTorch's JSON of a tree.
    shapes : tuple of tuple
        The least and the largest size of each dimension of each input; None for no limit.
    dtypes : tuple of str
        The dtype of each input; empty for a number, which is a part of the code.
    mutated : tuple of tuple
        The argument of the graph that takes a result, and the number of that result; the caller
        gets those behind.
    replay : bool
        Whether calls are captured as CUDA graphs.
    """

    device: str
    held: tuple[str, ...]
    inputs: str
    outputs: str
    shapes: tuple[tuple[tuple[Natural, Natural | None], ...], ...]
    dtypes: tuple[str, ...]
    mutated: tuple[tuple[Natural, Natural], ...]
    replay: bool


class Compiled:
    """A compiled model, called as the module was.

    Parameters
    ----------
    interface : Interface
        How it is called.
    record : PieceRecord
        How its code is called.
    library : Path
        The file of its code.
    tensors : mapping
        Its weights and buffers by name; a buffer that the model changes is changed in place.
    report : Report, optional
        What was fused, and why the rest was not; None for a model that was loaded.
    """

    def __init__(
        self,
        interface: Interface,
        record: PieceRecord,
        library: Path,
        tensors: Mapping[str, torch.Tensor],
        report: Report | None = None,
    ):
        self.tensors = dict(tensors)
        self.report = report
        self._interface = interface
        self._record = record
        self._library = library
        self._device = torch.device(interface.device)
        self._inputs = pytree.treespec_loads(interface.inputs)
        self._outputs = pytree.treespec_loads(interface.outputs)
        module = tvm.runtime.load_module(str(library))
        self._program = Program(record, module, self._device, replay=interface.replay)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the module returns.

        Raises
        ------
        TypeError
            If the arguments are nested otherwise than the example's were.
        ValueError
            If an argument has another dtype, rank or size than the model was compiled for.
        """
        flat, spec = pytree.tree_flatten((args, kwargs))
        if spec != self._inputs:
            raise TypeError(f"the model takes {self._inputs}, not {spec}")
        self._check(flat)
        held = [self.tensors[name] for name in self._interface.held]
        arguments = [*held, *flat]
        made = self._program.results(arguments)
        for target, result in self._interface.mutated:
            arguments[target].copy_(made[result])
        return pytree.tree_unflatten(made[len(self._interface.mutated) :], self._outputs)

    def _check(self, flat: Sequence[Any]) -> None:
        expected = zip(self._interface.shapes, self._interface.dtypes, strict=True)
        for n, (value, (shape, dtype)) in enumerate(zip(flat, expected, strict=True)):
            if not dtype:
                continue
            sizes = "x".join(_range(*limits) for limits in shape) or "without dimensions"
            wanted = f"input {n} must be a tensor of {dtype} {sizes} on {self._device}"
            if not isinstance(value, torch.Tensor):
                raise ValueError(f"{wanted}, not {type(value).__name__}")
            fits = value.dim() == len(shape) and all(
                least <= size and (most is None or size <= most)
                for size, (least, most) in zip(value.shape, shape, strict=True)
            )
            if not fits or str(value.dtype) != f"torch.{dtype}" or value.device != self._device:
                got = "x".join(map(str, value.shape)) or "without dimensions"
                raise ValueError(f"{wanted}, not of {value.dtype} {got} on {value.device}")

    def save(self, path: str | Path) -> None:
        """Write the model to a new directory.

        Parameters
        ----------
        path : str or Path
            The directory; it must not exist.

        Raises
        ------
        FileExistsError, OSError
            If `path` exists, or cannot be written.
        """
        path = Path(path)
        if path.exists():
            raise FileExistsError(f"{path} exists; choose another directory or remove it")
        path.parent.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
        try:
            shutil.copyfile(self._library, part / LIBRARY)
            names: dict[int, str] = {}  # tied weights are written once
            same = {name: names.setdefault(id(t), name) for name, t in self.tensors.items()}
            kept = {n: self.tensors[n].detach().contiguous() for n in names.values()}
            save_file(kept, part / WEIGHTS)
            told = {
                "version": VERSION,
                "same": same,
                "interface": asdict(self._interface),
                "record": asdict(self._record),
            }
            (part / MANIFEST).write_text(json.dumps(told), encoding="utf-8")
            part.chmod(0o755)
            part.rename(path)
        finally:
            shutil.rmtree(part, ignore_errors=True)


def load(path: str | Path) -> Compiled:
    """Load a model that `Compiled.save` wrote.

    Its code is executed when it is called: load only what you trust.

    Parameters
    ----------
    path : str or Path
        The directory.

    Raises
    ------
    ModelFileError
        If the directory holds no such model, or one of another version.
    OSError
        If it cannot be read.
    """
    path = Path(path)
    try:
        told = json.loads(read_file(path / MANIFEST))
        if told.get("version") != VERSION:
            text = f"{path} has version {told.get('version')!r}; this package reads {VERSION}"
            raise ModelFileError(text)
        interface = read(Interface, tuples(told["interface"]), ModelFileError, str(path))
        record = piece_record(told["record"], ModelFileError, str(path))
        weights = load_file(path / WEIGHTS, device=interface.device)
        tensors = {name: weights[kept] for name, kept in told["same"].items()}
        return Compiled(interface, record, path / LIBRARY, tensors)
    except (ValueError, LookupError, TypeError, AttributeError) as err:
        raise ModelFileError(f"{path} holds no compiled model: {err}") from err


def compile(  # the field's name for it
    module: torch.nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
    options: Mapping[str, Any] | TorchOptions | None = None,
) -> Compiled:
    """Compile a module ahead of time, as one function.

    Parameters
    ----------
    module : torch.nn.Module
        A module in evaluation mode; it is not changed.
    args, kwargs : sequence, mapping
        Examples of its arguments.
    dynamic_shapes : optional
        Which sizes may change, as of `torch.export.export`.
    options : mapping or TorchOptions, optional
        As of the backend.  Nothing can stay in PyTorch: ``strict`` is always true.

    Returns
    -------
    Compiled
        Called as `module` is.

    Raises
    ------
    PipelineError
        If the module is in training mode, or an option is none.
    RelaxFusionError
        If an operator cannot be compiled; the message names each.
    """
    if not isinstance(module, torch.nn.Module):
        raise PipelineError(f"module is {type(module).__name__}; must be a torch.nn.Module")
    if module.training:
        raise PipelineError("the module is in training mode; call module.eval() first")
    chosen = options_of(options)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        program = torch.export.export(
            module, tuple(args), dict(kwargs or {}), dynamic_shapes=dynamic_shapes, strict=False
        ).run_decompositions(decompositions())
    tensors = {**dict(module.named_parameters(remove_duplicate=False)), **_buffers(module, program)}
    return _compiled(program, tensors, chosen)


def _buffers(module: torch.nn.Module, program: ExportedProgram) -> dict[str, torch.Tensor]:
    return {**dict(module.named_buffers(remove_duplicate=False)), **program.constants}


def _compiled(
    program: ExportedProgram, tensors: Mapping[str, torch.Tensor], options: TorchOptions
) -> Compiled:
    graph = program.graph_module
    signature = program.graph_signature
    mutated = _with_mutations(graph, program)
    held = [spec.target for spec in signature.input_specs if spec.kind is not InputKind.USER_INPUT]
    user = [spec for spec in signature.input_specs if spec.kind is InputKind.USER_INPUT]
    arguments = [node for node in graph.graph.nodes if node.op == "placeholder"]
    values = [node.meta.get("val") for node in arguments]
    device = next((v.device for v in values if isinstance(v, torch.Tensor)), torch.device("cpu"))
    target = options.target_for(device)
    written_out(graph)
    if left := refusals(graph):
        told = "; ".join(f"{node.name}: {why}" for node, why in list(left.items())[:8])
        raise RelaxFusionError(f"{len(left)} operators cannot be compiled: {told}")
    changed = {n for n, _ in mutated}
    mod, record = import_graph(
        graph, lambda n: n < len(held) and n not in changed, program.range_constraints
    )
    report = Report()
    executable = build(with_clipped_indices(mod), target, report=report, **options.pipeline(target))
    directory = tempfile.mkdtemp(prefix="relax_fusion-")
    library = Path(directory) / LIBRARY
    executable.export_library(str(library))
    interface = Interface(
        str(device),
        tuple(str(name) for name in held),
        pytree.treespec_dumps(program.call_spec.in_spec),
        pytree.treespec_dumps(program.call_spec.out_spec),
        tuple(_limits(values[len(held) + n], program.range_constraints) for n in range(len(user))),
        tuple(_dtype(values[len(held) + n]) for n in range(len(user))),
        tuple(mutated),
        options.use_cuda_graph,
    )
    return Compiled(interface, record, library, {n: tensors[n] for n in held}, report)


def _with_mutations(module: GraphModule, program: ExportedProgram) -> list[tuple[int, int]]:
    """Write rows of caches in place, and return which arguments take which other results."""
    graph = module.graph
    arguments = {node.name: node for node in graph.nodes if node.op == "placeholder"}
    by_target = {spec.target: spec.arg.name for spec in program.graph_signature.input_specs}
    output = graph.output_node()
    user = []
    with graph.inserting_before(output):
        made = cast("tuple[Any, ...]", output.args[0])
        for spec, value in zip(program.graph_signature.output_specs, made, strict=True):
            if spec.kind is OutputKind.USER_OUTPUT:
                user.append(value)
                continue
            name = spec.target if spec.kind is OutputKind.USER_INPUT_MUTATION else None
            into = arguments[name or by_target[spec.target]]
            graph.call_function(_aten.copy_.default, (into, value)).meta["val"] = value.meta["val"]
    for n, value in enumerate(user):
        if not isinstance(value, Node):
            raise RelaxFusionError(f"result {n} of the module is {value!r}; must be a tensor")
    output.args = (tuple(user),)
    write_in_place(module)
    copies = graph.find_nodes(op="call_function", target=_aten.copy_.default)
    places = {node: n for n, node in enumerate(arguments.values())}
    mutated = [(places[copy.args[0]], n) for n, copy in enumerate(copies)]
    output.args = ((*(copy.args[1] for copy in copies), *user),)
    for copy in copies:
        graph.erase_node(copy)
    module.recompile()
    return mutated


def _range(least: int, most: int | None) -> str:
    """Return the sizes that a dimension can have, as text."""
    if least == most:
        return str(least)
    return f"({least} to {'any' if most is None else most})"


def _limits(value: Any, ranges: Mapping[Any, Any]) -> tuple[tuple[int, int | None], ...]:
    """Return the least and the largest size of each dimension of a fake tensor."""
    found = []
    for size in value.shape if isinstance(value, torch.Tensor) else ():
        if isinstance(size, int):
            found.append((size, size))
            continue
        expr = size.node.expr
        known = ranges[expr] if expr in ranges else size.node.shape_env.bound_sympy(expr)
        most = int(known.upper) if known.upper.is_Integer else None
        found.append((max(int(known.lower), 1), most))
    return tuple(found)


def _dtype(value: Any) -> str:
    return str(value.dtype).removeprefix("torch.") if isinstance(value, torch.Tensor) else ""
