"""A model compiled ahead of time: called with tensors of PyTorch, kept in a directory."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import tempfile
import warnings
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.export import ExportedProgram
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import _pytree as pytree

from ..errors import ModelFileError, PipelineError, RelaxFusionError
from ..files import read_file, write_file
from ..validation import read_json
from .decompositions import decompositions
from .interface import Interface
from .options import TorchOptions, options_of
from .program import Program, load_library
from .record import PieceRecord, Uses
from .trees import RETURNABLE, tree_data, tree_of

if TYPE_CHECKING:
    from ..report import Report

VERSION = 3
"""The version of the files that `Compiled.save` writes."""

MANIFEST, LIBRARY, WEIGHTS = "model.json", "model.so", "weights.safetensors"
"""The names of those files."""


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
    trees : tuple of TreeSpec
        How its arguments, by place and by name, and its results are nested.
    report : Report, optional
        What was fused, and why the rest was not; None for a model that was loaded.
    """

    def __init__(
        self,
        interface: Interface,
        record: PieceRecord,
        library: Path,
        tensors: Mapping[str, torch.Tensor],
        trees: tuple[pytree.TreeSpec, pytree.TreeSpec],
        report: Report | None = None,
    ):
        self.tensors = dict(tensors)
        self.report = report
        self._interface = interface
        self._record = record
        self._library = library
        self._trees = trees
        by_place, by_name = trees[0].children()
        self._arguments = (*by_place.children(), *by_name.children())
        uses = Uses(
            interface.mutated, frozenset(range(len(interface.mutated), len(record.returned)))
        )
        device = torch.device(interface.device)
        module = load_library(library, device)
        self._program = Program(record, module, device, uses, replay=interface.replay)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the module returns.

        Raises `TypeError` if an argument is missing, unknown, or nested otherwise than the
        example's.  Raises `ValueError` if an argument has another dtype, rank, size or device than
        the model was compiled for.
        """
        given = self._interface.arguments(args, kwargs)
        inputs = self._interface.inputs(given, self._arguments)
        held = [self.tensors[name] for name in self._interface.held]
        made = self._program.results([*held, *inputs])
        tensors = iter(made[len(self._interface.mutated) :])
        results = [next(tensors) if is_tensor else v for is_tensor, v in self._interface.results]
        return pytree.tree_unflatten(results, self._trees[1])

    def __repr__(self) -> str:
        """Tell of which model, and for which arguments, it is."""
        return f"<compiled {self._interface}>"

    def __reduce__(self) -> Any:
        """Refuse to be pickled: compiled code is kept by `save`."""
        raise TypeError("a compiled model cannot be pickled or copied; use save() and load()")

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
        RelaxFusionError
            If a class of an argument or a result cannot be kept; the message names it.
        """
        path = Path(path)
        if path.exists():
            raise FileExistsError(f"{path} exists; choose another directory or remove it")
        trees = [tree_data(tree) for tree in self._trees]
        path.parent.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
        try:
            shutil.copyfile(self._library, part / LIBRARY)
            names: dict[tuple[Any, ...], str] = {}  # tied weights are written once
            same = {name: names.setdefault(_memory(t), name) for name, t in self.tensors.items()}
            # others may lie in the same memory: each is written by itself
            kept = {n: self.tensors[n].detach().clone().contiguous() for n in names.values()}
            save_file(kept, part / WEIGHTS)
            told = {
                "version": VERSION,
                "library": _digest(part / LIBRARY),
                "same": same,
                "trees": trees,
                "interface": asdict(self._interface),
                "record": asdict(self._record),
            }
            write_file(part / MANIFEST, json.dumps(told))
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
        if told["library"] != _digest(path / LIBRARY):
            raise ModelFileError(f"{path / LIBRARY} has another checksum; it is damaged")
        texts = (json.dumps(told[name]) for name in ("interface", "record"))
        interface = read_json(Interface, next(texts), ModelFileError, str(path))
        record = read_json(PieceRecord, next(texts), ModelFileError, str(path))
        weights = load_file(path / WEIGHTS, device=interface.device)
        tensors = {name: weights[kept] for name, kept in told["same"].items()}
        trees = (tree_of(told["trees"][0]), tree_of(told["trees"][1]))
        return Compiled(interface, record, path / LIBRARY, tensors, trees)
    except ModelFileError:
        raise
    except (ValueError, LookupError, TypeError, AttributeError, SafetensorError) as err:
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
        A module in evaluation mode.  Its parameters and buffers are held, not copied: calls write
        to the buffers that the module would write to.
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
    from ..report import Report
    from .exported import compile_program  # imports TVM

    chosen = options_of(options)
    if told := [name for name in ("report", "dryrun", "check") if getattr(chosen, name)]:
        raise PipelineError(f"option {told[0]} is torch.compile's; a compiled model has a report")
    args, kwargs = tuple(args), dict(kwargs or {})
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*LeafSpec", FutureWarning)  # PyTorch's own use of it
        program = _exported(module, args, kwargs, dynamic_shapes)
    own = (module.named_parameters, module.named_buffers)
    tensors = {n: t for each in own for n, t in each(remove_duplicate=False)} | program.constants
    directory = tempfile.TemporaryDirectory(prefix="relax_fusion-")
    library = Path(directory.name) / LIBRARY
    report = Report()
    interface, record = compile_program(
        program, _names(module, args, kwargs), library, chosen, report
    )
    held = {name: tensors[name] for name in interface.held}
    trees = (program.call_spec.in_spec, program.call_spec.out_spec)
    compiled = Compiled(interface, record, library, held, trees, report)
    weakref.finalize(compiled, directory.cleanup)
    return compiled


def _exported(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic_shapes: Any
) -> ExportedProgram:
    try:
        program = torch.export.export(
            module, args, kwargs, dynamic_shapes=dynamic_shapes, strict=False
        )
    except RuntimeError as err:
        if unknown := re.search(r"Found <class '(.*)'> in output", str(err)):
            text = f"the module returns {unknown[1]}; a compiled one returns {RETURNABLE}"
            raise RelaxFusionError(text) from err
        raise
    return program.run_decompositions(decompositions())


def _names(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what a module and its arguments are called, as `Interface` has it."""
    known = signature(module.forward).parameters.values()
    by_place = [p.name for p in known if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    more = [f"args[{n}]" for n in range(len(by_place), len(args))]
    parameters = (*by_place, *more)
    named = [*zip(parameters, args, strict=False), *kwargs.items()]
    names = [
        name + pytree.keystr(path)
        for name, value in named
        for path, _ in pytree.tree_leaves_with_path(value)
    ]
    return {
        "module": type(module).__name__,
        "parameters": parameters,
        "places": len(args),
        "keywords": tuple(kwargs),
        "names": tuple(names),
    }


def _memory(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return what two tensors have in common that are the same numbers in the same memory."""
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _digest(path: Path) -> str:
    return hashlib.sha256(read_file(path)).hexdigest()
