"""``relax-fusion run``: generation, or a call with arrays, by a compiled directory."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tvm

from ..hardware.target import is_cpu, make_target
from ..models import (
    BertConfig,
    ExportedModel,
    Generator,
    GPT2Config,
    LlamaConfig,
    ModelError,
    ParallelGenerator,
    config_from_dict,
    random_weights,
)
from ..models.threads import use_all_cores
from ..parallel import Workers
from ..validation import shown
from .build import device_for, load_library
from .call import call_command
from .console import CliError, Console
from .manifest import (
    LIBRARY,
    MANIFEST,
    TOKENIZER,
    Manifest,
    check_files,
    exported_again,
    read_manifest,
    stored_weights,
    versions,
)


@dataclass(frozen=True)
class Timing:
    """New tokens and how long they took: seconds of the prompt, and of a step after it."""

    tokens: list[int]
    prefill_s: float
    decode_s: float


def run_command(args: argparse.Namespace, console: Console) -> int:
    """Call what a directory holds: generate from a prompt, or compute outputs of arrays."""
    use_all_cores()  # before TVM has made its threads
    directory = Path(args.out)
    manifest = read_manifest(directory)
    _check_arguments(manifest, args)
    check_runnable(args.out, manifest, args)
    if "decode" not in manifest.functions:
        return call_command(args, console, manifest)
    _print(args, console, *generated(args.out, manifest, args, console))
    return 0


def _check_arguments(manifest: Manifest, args: argparse.Namespace) -> None:
    """Refuse arguments that are for models of the other kind."""
    prompted = args.prompt is not None or args.prompt_ids is not None
    if "decode" in manifest.functions:
        if args.inputs is not None or args.output is not None:
            raise CliError(
                f"{manifest.source} generates text; give --prompt or --prompt-ids, and no arrays",
                code=2,
            )
        if not prompted:
            raise CliError("one of the arguments --prompt-ids --prompt is required", code=2)
    elif prompted or args.max_new_tokens is not None:
        raise CliError(
            f"{manifest.source} generates no text; give its inputs by --input NAME=FILE.npy, or an "
            "encoder's to relax_fusion.models.Encoder",
            code=2,
        )


def generated(
    out: str,
    manifest: Manifest,
    args: argparse.Namespace,
    console: Console,
    watch: Callable[[Generator | ParallelGenerator], None] = lambda _: None,
) -> tuple[list[int], Timing, Any]:
    """Generate from a prompt; return its tokens, the new ones with their times, and the tokenizer.

    `watch` gets what generates before it does.
    """
    directory = Path(out)
    new = 16 if args.max_new_tokens is None else args.max_new_tokens
    config = _config(directory, manifest)
    tokenizer = _tokenizer(directory, manifest) if args.prompt is not None else None
    prompt = args.prompt_ids if tokenizer is None else _encoded(tokenizer, args.prompt)
    _check_prompt(prompt, new, config.vocab_size, manifest.max_seq_len or 0)
    check_files(directory, manifest)
    device = device_for(directory, manifest, console)
    console.step("loading the library and the weights")
    with _generator(directory, manifest, device, args) as generator:
        console.step("generating")
        watch(generator)
        return prompt, _generate(generator, prompt, new, config.end_tokens), tokenizer


def check_runnable(out: str, manifest: Manifest, args: argparse.Namespace) -> None:
    """Refuse a directory without weights, or of another TVM."""
    if manifest.weights == "none":
        raise CliError(f"{out} was compiled with --no-weights; compile it with weights to run")
    if manifest.weights == "file" and args.seed is not None:
        raise CliError(f"--seed is for random weights, but {out} has its own", code=2)
    made, here = manifest.versions.tvm, versions().tvm
    if made.split(".")[:2] != here.split(".")[:2]:
        raise CliError(f"{out} was compiled with TVM {made}, this is {here}; compile it again")


def _config(directory: Path, manifest: Manifest) -> LlamaConfig | GPT2Config:
    try:
        config = config_from_dict(manifest.config or {})
    except ModelError as err:
        raise CliError(f"{directory / MANIFEST} is damaged: {err}") from err
    if isinstance(config, BertConfig):
        raise CliError(f"{directory / MANIFEST} is damaged: an encoder has no 'decode'")
    return config


def _check_prompt(prompt: list[int], new: int, vocab_size: int, most: int) -> None:
    if not prompt:
        raise CliError("the prompt has no tokens; a model needs one to begin with", code=2)
    wrong = next((token for token in prompt if not 0 <= token < vocab_size), None)
    if wrong is not None:
        raise CliError(f"prompt token {shown(wrong)} must be in 0..{vocab_size - 1}")
    # The last new token is never fed back, so it takes no room.
    if len(prompt) + new - 1 > most:
        raise CliError(
            f"{len(prompt)} prompt tokens and {new} new ones do not fit the {most} that "
            "the model was compiled for; ask for fewer, or compile with a larger --max-seq-len"
        )


def _tokenizer(directory: Path, manifest: Manifest) -> Any:
    file = directory / TOKENIZER
    if TOKENIZER not in manifest.files or not file.is_file():
        raise CliError(
            f"{file} does not exist, because the model came without one; pass --prompt-ids", code=2
        )
    from tokenizers import Tokenizer  # slow to import, and of use to text prompts only

    tokenizer = _asked(lambda: Tokenizer.from_file(str(file)), f"{file} is no tokenizer")
    tokenizer.no_truncation()  # what a file says of these is for training, on whole batches
    tokenizer.no_padding()
    return tokenizer


def _encoded(tokenizer: Any, prompt: str) -> list[int]:
    try:
        text = prompt.encode().decode()
    except UnicodeEncodeError as err:
        raise CliError(f"--prompt is {shown(prompt)}; must be text in UTF-8", code=2) from err
    failed = f"the tokenizer cannot read --prompt {shown(prompt)}"
    return _asked(lambda: tokenizer.encode(text).ids, failed)


def _asked(call: Callable[[], Any], failed: str) -> Any:
    """Call the tokenizer, whose errors have no class of their own; its panics are no Exception."""
    try:
        return call()
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as err:
        raise CliError(f"{failed}: {err}") from err


@contextmanager
def _generator(
    directory: Path, manifest: Manifest, device: tvm.runtime.Device, args: argparse.Namespace
) -> Iterator[Generator | ParallelGenerator]:
    """Load a decoder, on as many workers as it was compiled for; these end at the end."""
    library = load_library(directory, manifest)
    exported: ExportedModel = exported_again(manifest)
    if manifest.shards > 1:
        with spread_generator(directory, manifest, exported, args.seed or 0) as generator:
            yield generator
        return
    weights: Iterable[np.ndarray] = (
        stored_weights(directory, manifest)
        if manifest.weights == "file"
        else random_weights(exported, args.seed or 0)
    )
    yield Generator(library, exported, weights, device)


def spread_generator(
    directory: Path, manifest: Manifest, exported: ExportedModel, seed: int
) -> ParallelGenerator:
    """Start the workers of a decoder; `seed` is that of random weights."""
    kind: Literal["cpu", "cuda"] = "cpu" if is_cpu(make_target(manifest.target)) else "cuda"
    stored = partial(stored_weights, directory, manifest)
    weights = stored if manifest.weights == "file" else seed
    workers = Workers(manifest.shards, device=kind)
    return ParallelGenerator(workers, directory / LIBRARY, exported, weights)


def _generate(
    generator: Generator | ParallelGenerator,
    prompt: list[int],
    max_new_tokens: int,
    end: tuple[int, ...],
) -> Timing:
    """Generate greedily; every sequence of a batch gets the same prompt."""
    start = time.perf_counter()
    logits = generator.prefill(np.tile(np.asarray(prompt), (generator.batch, 1)))
    prefilled = time.perf_counter()
    tokens = [int(logits[0].argmax())]
    while len(tokens) < max_new_tokens and tokens[-1] not in end:
        logits = generator.decode(np.full(generator.batch, tokens[-1], "int32"))
        tokens.append(int(logits[0].argmax()))
    decode_s = (time.perf_counter() - prefilled) / max(len(tokens) - 1, 1)
    return Timing(tokens, prefilled - start, decode_s)


def _print(
    args: argparse.Namespace, console: Console, prompt: list[int], timing: Timing, tokenizer: Any
) -> None:
    text = None
    if tokenizer is not None:
        failed = f"the tokenizer cannot write {shown(timing.tokens)}"
        text = _asked(lambda: tokenizer.decode(timing.tokens), failed)
    if args.json:
        console.json(
            {
                "prompt_ids": list(prompt),
                "tokens": timing.tokens,
                "text": text,
                "prefill_ms": timing.prefill_s * 1e3,
                "decode_ms_per_token": timing.decode_s * 1e3,
            }
        )
        return
    console.result(",".join(map(str, timing.tokens)) if text is None else args.prompt + text)
    console.result(
        f"\n{len(prompt)} prompt tokens in {timing.prefill_s * 1e3:.1f} ms; "
        f"{len(timing.tokens)} new tokens, {timing.decode_s * 1e3:.1f} ms each"
    )
