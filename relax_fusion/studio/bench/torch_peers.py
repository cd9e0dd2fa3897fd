"""The same model in torch: by transformers from the same configuration, or from a .pt2 file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

import numpy as np

from ...cli.console import CliError
from ...cli.source import FileSource
from ...models import BertConfig, ExportedModel
from ..measure import Session
from .contenders import COMPILED, GRAPHS, TORCH, Contender
from .subject import Subject

MODES = {
    COMPILED: (None, "torch.compile in its default mode (which uses no CUDA graphs)"),
    GRAPHS: ("reduce-overhead", "torch.compile in its mode reduce-overhead (with CUDA graphs)"),
}
"""Modes of torch.compile, and what people read of them."""

TUNED = "max-autotune-no-cudagraphs"
"""The benchmarks of kernels measure by this mode of torch.compile: it tries its own tiles, and CUDA
graphs are made of everybody alike."""


def under_compile(function: Any, mode: str | None, **options: Any) -> Any:
    """Return a function, or a model, under torch.compile, which forgets what it compiled before.

    What was compiled counts against a limit of recompilations.
    """
    import torch
    from torch._inductor import select_algorithm

    select_algorithm.PRINT_AUTOTUNE = False
    torch._dynamo.reset()
    return torch.compile(function, mode=mode, **options)


class TorchPeers:
    """Makes the contenders that run a model in torch; they share its weights."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        kind = "cpu" if subject.device.type == "cpu" else "cuda"
        self._device = kind if kind == "cpu" else f"{kind}:{subject.device.index}"

    def eager(self) -> Contender:
        """Return the model as torch runs it, operator by operator."""
        return self._contender(TORCH, self._model, f"{self._about}, eager")

    def compiled(self, name: str) -> Contender:
        """Return it under torch.compile, in one of `MODES`, with all sizes compiled."""
        mode, told = MODES[name]
        if name == GRAPHS and self._device == "cpu":
            raise CliError(f"{GRAPHS} needs a GPU")
        if name == GRAPHS and self._subject.is_decoder:  # 2.11 tries, and may end the process
            raise CliError("PyTorch makes no CUDA graph of a decoder, which writes to its cache")
        model = under_compile(self._model, mode)
        made = self._contender(name, model, f"{self._about}, by {told}")
        made.turn()
        return made

    @property
    def _has_our_weights(self) -> bool:
        exported = self._subject.exported
        return exported is None or exported.quantization is None

    @property
    def _about(self) -> str:
        import torch

        what = f"{self._subject.manifest.source}.pt2"
        if self._subject.exported is not None:
            import transformers

            what = f"{type(self._model).__name__} of transformers {transformers.__version__}"
        told = f"{what} in torch {torch.__version__}"
        weights = "the same weights" if self._has_our_weights else "random weights, not quantised"
        return f"{told}, {self._subject.manifest.dtype}, {weights}"

    @cached_property
    def _model(self) -> Any:
        import torch

        exported = self._subject.exported
        with torch.no_grad():
            if exported is None:
                return self._from_file()
            made = _of_config(self._subject.manifest.config or {}, exported, self._device)
            if self._has_our_weights:
                _give(made, _state(exported, self._subject.weights()))
            return made

    def _from_file(self) -> Any:
        import torch

        source = self._subject.source
        if not isinstance(source, FileSource):
            raise CliError(f"{self._subject.directory} has no torch program; give the .pt2 file")
        if source.path.suffix.lower() != ".pt2":
            raise CliError(f"torch runs no {source.path.suffix} files")
        program = torch.export.load(source.path)
        if self._device != "cpu":
            from torch.export.passes import move_to_device_pass

            program = move_to_device_pass(program, self._device)
        return program.module()

    def _contender(self, name: str, model: Any, about: str) -> Contender:
        import torch

        subject, set_threads = self._subject, torch.set_num_threads
        if not subject.is_decoder:
            runs: Any = _TorchCall(model, subject.inputs(), self._device)
            return Contender(name, about, subject, runs, self._has_our_weights, set_threads)
        room = None if name == TORCH else subject.sizes["prompt"] + subject.sizes["new_tokens"]
        cache = "a growing cache" if room is None else f"a static cache of {room} tokens"
        runs = _TorchSession(model, self._model.config, self._device, room)
        about = f"{about}, {cache}"
        return Contender(name, about, subject, runs, self._has_our_weights, set_threads)


def eager_decoder(
    fields: Mapping[str, Any], exported: ExportedModel, weights: Iterable[np.ndarray]
) -> Session:
    """Return a decoder of a ``config.json`` as torch runs it on a CPU, with our weights."""
    import torch

    with torch.no_grad():
        made = _of_config(fields, exported, "cpu")
        _give(made, _state(exported, weights))
    return _TorchSession(made, made.config, "cpu", None)


def _of_config(fields: Mapping[str, Any], exported: ExportedModel, device: str) -> Any:
    """Return transformers' model of a configuration, with weights of its own."""
    import torch
    import transformers

    kind: Any = transformers.AutoModelForCausalLM
    options: dict[str, Any] = {}
    if isinstance(exported.config, BertConfig):
        kind = transformers.AutoModelForMaskedLM if exported.config.masked_lm else None
    if kind is None:
        kind, options = transformers.AutoModel, {"add_pooling_layer": False}
    others = {k: v for k, v in fields.items() if k != "model_type"}
    config = transformers.AutoConfig.for_model(fields["model_type"], **others)
    torch.manual_seed(0)
    with torch.device(device):
        made = kind.from_config(
            config, dtype=getattr(torch, exported.dtype), attn_implementation="sdpa", **options
        )
    return made.eval()


def _state(exported: ExportedModel, weights: Iterable[np.ndarray]) -> dict[str, Any]:
    """Return the tensors of a checkpoint that weights were, or could have been, made of."""
    import torch

    found: dict[str, Any] = {}
    for param, array in zip(exported.params, weights, strict=True):
        names, rows = param.recipe.names, list(param.recipe.rows) or [len(array)]
        words = array.view("int16") if param.dtype == "bfloat16" else array
        tensor = torch.from_numpy(np.ascontiguousarray(words))
        tensor = tensor.view(torch.bfloat16) if param.dtype == "bfloat16" else tensor
        for name, part in zip(names, torch.split(tensor, rows), strict=bool(names)):
            found[name] = part.T if param.recipe.transpose else part
    return found


def _give(model: Any, state: dict[str, Any]) -> None:
    """Give weights to a model, whose every parameter has to be among them."""
    own = model.state_dict()
    if state.keys() & own.keys() != state.keys():  # of a bare encoder
        state = {name.removeprefix("bert."): tensor for name, tensor in state.items()}
    unknown = sorted(state.keys() - own.keys())
    given = {own[name].data_ptr() for name in state if name in own}
    missing = [n for n, tensor in own.items() if n not in state and tensor.data_ptr() not in given]
    if unknown or missing:
        raise CliError(
            f"the weights do not fit {type(model).__name__} of transformers: it lacks "
            f"{unknown[:3]}, and we lack {missing[:3]}"
        )
    model.load_state_dict(state, strict=False)


def _begin_step() -> None:
    """Let a CUDA graph write over the results of the step before."""
    import torch

    torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]


class _TorchSession:
    """A decoder of transformers with its cache, as `Generator` is one."""

    def __init__(self, model: Any, config: Any, device: str, room: int | None) -> None:
        import transformers

        self._model, self._device, self._config = model, device, config
        static = transformers.StaticCache
        self._static = None if room is None else static(config=config, max_cache_len=room)
        self.reset()

    def reset(self) -> None:
        import transformers

        if self._static is not None:
            self._static.reset()  # type: ignore[no-untyped-call]
        self._cache = self._static or transformers.DynamicCache(config=self._config)

    def prefill(self, ids: Any) -> np.ndarray:
        import torch

        _begin_step()
        with torch.no_grad():
            out = self._model(
                torch.from_numpy(ids.astype("int64")).to(self._device),
                past_key_values=self._cache,
                use_cache=True,
                logits_to_keep=1,
            )
            logits: np.ndarray = out.logits[:, -1].float().cpu().numpy()
        return logits

    def decode(self, ids: Any) -> np.ndarray:
        return self.prefill(ids.reshape(-1, 1))


class _TorchCall:
    """A model with its inputs on the device."""

    def __init__(self, model: Any, inputs: list[np.ndarray], device: str) -> None:
        import torch

        self._model, self._is_gpu = model, device != "cpu"
        self._inputs = [torch.from_numpy(array).to(device) for array in inputs]

    def __call__(self) -> Any:
        import torch

        _begin_step()
        with torch.no_grad():
            result = self._model(*self._inputs)
            if self._is_gpu:
                torch.cuda.synchronize()
        return result

    def arrays(self, result: Any) -> list[np.ndarray]:
        from torch.utils import _pytree

        leaves = _pytree.tree_leaves(dict(result) if hasattr(result, "keys") else result)
        return [leaf.float().cpu().numpy() for leaf in leaves if hasattr(leaf, "cpu")]
