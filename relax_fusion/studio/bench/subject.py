"""What is measured: a compiled directory, the sizes of its calls, and what is fed to it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import tvm

from ...cli.call import weights_of
from ...cli.console import CliError
from ...cli.manifest import Compiled, Manifest, exported_again
from ...cli.source import Source
from ...frontends import ImportedModel, Signature
from ...models import ExportedModel, random_weights
from ...report.sizes import sizes_text, value_of
from ...validation import shown
from ..compilation import Compilation, read_compilation
from ..measure import tokens

PROMPT, NEW_TOKENS, SIZE = 128, 32, 128
"""The defaults: tokens of a prompt, tokens after it, and symbolic sizes of other models."""


@dataclass(frozen=True)
class Subject:
    """A compiled model with the sizes that it is measured at.

    `sizes` are ``prompt`` and ``new_tokens`` of a decoder, the symbolic sizes of others.
    """

    directory: Path
    manifest: Manifest
    device: tvm.runtime.Device
    sizes: Mapping[str, int]
    source: Source | None = None
    imported: ImportedModel | None = None
    _random: list[np.ndarray] = field(default_factory=list, repr=False)

    @property
    def is_decoder(self) -> bool:
        """Whether it generates text."""
        return "decode" in self.manifest.functions

    @property
    def batch(self) -> int:
        """Sequences at once, of a decoder."""
        return self.manifest.batch or 1

    @property
    def function(self) -> str:
        """The function of a model that is no decoder."""
        return self.manifest.functions[0]

    @cached_property
    def exported(self) -> ExportedModel | None:
        """The model as it was built from its configuration, if it was."""
        return None if self.manifest.config is None else exported_again(self.manifest)

    @cached_property
    def compilation(self) -> Compilation:
        """What was decided about the model."""
        return read_compilation(str(self.directory))

    def weights(self) -> Iterable[np.ndarray]:
        """Return the weights, random ones where the directory has none."""
        exported = self.exported
        if self.manifest.weights == "file" or exported is None:
            return weights_of(self.directory, self.manifest, 0)
        if not self._random:  # making them takes longer than copying them
            self._random.extend(random_weights(exported))
        return self._random

    def forget_weights(self) -> None:
        """Give the memory of random weights back, when everybody has theirs."""
        self._random.clear()

    def calls(self) -> dict[str, dict[str, int]]:
        """Return by step the function that is called and the symbolic sizes that it has then."""
        if not self.is_decoder:
            return {self.function: dict(self.sizes)}
        prompt = self.sizes["prompt"]
        return {
            "prefill": {"seq_len": prompt, "total_len": prompt},
            "decode": {"seq_len": 1, "total_len": prompt + 1},
        }

    def size(self, step: str) -> str:
        """Return the sizes of all calls of a step as text."""
        sizes: dict[str, int | str] = dict(self.calls()[step])
        if self.is_decoder and step == "decode":
            first, more = int(sizes["total_len"]), self.sizes["new_tokens"] - 2
            sizes["total_len"] = f"{first}..{first + more}" if more > 0 else first
        return sizes_text(sizes) or "static"

    def ids(self) -> np.ndarray:
        """Return the tokens of a decoder: the prompt, and those that are fed after it."""
        exported = self.exported
        assert exported is not None, "decoders are built from configurations"
        count = self.sizes["prompt"] + self.sizes["new_tokens"] - 1
        return tokens(count, exported.config.vocab_size)

    def inputs(self) -> list[np.ndarray]:
        """Return inputs for a model that is no decoder.

        Of a bundled encoder: tokens from all of the vocabulary, none of them masked.  Floats are
        normal, integers are 1: a token of any vocabulary, and a mask that hides nothing.
        """
        rng = np.random.default_rng(0)
        made = []
        for spec in _signature(self.manifest).inputs:
            shape = [_extent(size, self.sizes, spec.name) for size in spec.shape or ()]
            if self.exported is not None and spec.name == "input_ids":
                ids = tokens(int(np.prod(shape)), self.exported.config.vocab_size)
                made.append(ids.reshape(shape))
            elif spec.dtype.startswith(("float", "bfloat")):
                made.append(rng.standard_normal(shape, "float32").astype(spec.dtype))
            else:
                made.append(np.ones(shape, spec.dtype))
        return made


def sizes_of(
    manifest: Compiled, prompt: int | None, new_tokens: int | None, given: Mapping[str, int]
) -> dict[str, int]:
    """Return the sizes of calls, where those that were not given are as usual.

    Raises `CliError` if a size is none of the model, or it was not made for it.
    """
    if "decode" not in manifest.functions:
        if prompt is not None or new_tokens is not None:
            raise CliError(
                f"{manifest.source} generates no text: --prompt and --max-new-tokens are for "
                "models that do; it takes --size",
                code=2,
            )
        return _symbols(_signature(manifest).sizes, given, manifest.source)
    if given:
        raise CliError(
            f"--size {next(iter(given))}: {manifest.source} generates text, and takes --prompt and "
            "--max-new-tokens",
            code=2,
        )
    most = manifest.max_seq_len or 1
    new = new_tokens or min(NEW_TOKENS, max(1, most // 4))
    prompt = prompt or max(1, min(PROMPT, most - new + 1))
    if prompt + new - 1 > most:  # the last new token is never fed back
        raise CliError(
            f"--prompt {prompt} and --max-new-tokens {new} do not fit the {most} tokens that "
            f"{manifest.source} was compiled for; ask for fewer, or compile with a larger "
            "--max-seq-len",
            code=2,
        )
    return {"prompt": prompt, "new_tokens": new}


def _symbols(
    known: Mapping[str, tuple[int, int | None]], given: Mapping[str, int], source: str
) -> dict[str, int]:
    for name, size in given.items():
        if name not in known:
            names = ", ".join(known) or "none"
            raise CliError(
                f"--size names {shown(name)}; the symbolic sizes of {source} are {names}", code=2
            )
        least, most = known[name]
        if size < least or (most is not None and size > most):
            limit = f"from {least} to {most}" if most is not None else f"at least {least}"
            raise CliError(f"--size {name}={size}: {source} takes {limit}", code=2)
    usual = {
        name: max(least, min(SIZE, SIZE if most is None else most))
        for name, (least, most) in known.items()
    }
    return usual | dict(given)


def _signature(manifest: Compiled) -> Signature:
    if manifest.signature is None:
        raise CliError(f"the manifest of {manifest.source} is damaged: it says no inputs")
    return manifest.signature


def _extent(size: int | str, sizes: Mapping[str, int], name: str) -> int:
    found = value_of(size, sizes)
    if found is None:
        raise CliError(f"the size {shown(size)} of the input {shown(name)} is not known")
    return found
