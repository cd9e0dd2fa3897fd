"""GPT-2, BERT, LLaMA and decoders like it in Relax, and the loader of Hugging Face directories.

``load_config`` reads a ``config.json``, ``export`` builds the module, ``load_weights`` reads the
safetensors files, and ``Generator`` or ``Encoder`` runs what ``tvm.compile`` made of it::

    config = load_config(path)
    exported = export(config, dtype="float16", max_seq_len=4096)
    compiled = tvm.compile(exported.mod, target="llvm")
    tokens = Generator(compiled, exported, load_weights(path, exported)).generate(prompt, 32)
"""

from __future__ import annotations

from ..errors import (
    CheckpointFileError,
    ConfigError,
    ContextOverflowError,
    InputError,
    MissingTensorError,
    ModelError,
    TensorShapeError,
    UnknownArchitectureError,
    UnsupportedFeatureError,
    WeightsError,
)
from .config import BertConfig, Config, GPT2Config, LlamaConfig, config_from_dict, load_config
from .export import ExportedModel, ParamSpec, export
from .parallel import ParallelGenerator
from .rope import RopeScaling
from .session import Encoder, Generator
from .weights import NotFiniteWarning, UnusedTensorsWarning, load_weights, random_weights
from .zoo import zoo_config

__all__ = [
    "BertConfig",
    "CheckpointFileError",
    "Config",
    "ConfigError",
    "ContextOverflowError",
    "Encoder",
    "ExportedModel",
    "GPT2Config",
    "Generator",
    "InputError",
    "LlamaConfig",
    "MissingTensorError",
    "ModelError",
    "NotFiniteWarning",
    "ParallelGenerator",
    "ParamSpec",
    "RopeScaling",
    "TensorShapeError",
    "UnknownArchitectureError",
    "UnsupportedFeatureError",
    "UnusedTensorsWarning",
    "WeightsError",
    "config_from_dict",
    "export",
    "load_config",
    "load_weights",
    "random_weights",
    "zoo_config",
]
