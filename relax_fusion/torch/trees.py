"""How arguments and results are nested, as data that can be kept in a file."""

from __future__ import annotations

import json
from collections import namedtuple
from dataclasses import is_dataclass
from importlib import import_module
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..errors import ModelFileError, RelaxFusionError

RETURNABLE = (
    "tensors, numbers, tuples, lists, dicts, named tuples, and dataclasses that "
    "torch.export.register_dataclass knows, by a class that can be imported"
)
"""What a model that is compiled ahead of time can take and return."""


def tree_data(spec: pytree.TreeSpec) -> Any:
    """Return a tree as data: None for a leaf, or its class by name, its context and its branches.

    Raises `RelaxFusionError` if a class has no name by which it can be imported; the message names
    it.
    """
    if spec.is_leaf():
        return None
    kind, context = spec.type, spec.context
    if kind is namedtuple:
        kind, context = context, None
    name = f"{kind.__module__}:{kind.__qualname__}"
    if _class_of(name) is not kind or json.loads(json.dumps(context, default=repr)) != context:
        raise RelaxFusionError(
            f"{name} cannot be kept in a file; a model that is saved takes and returns {RETURNABLE}"
        )
    return [name, context, [tree_data(child) for child in spec.children()]]


def tree_of(data: Any) -> pytree.TreeSpec:
    """Return the tree that `tree_data` made data of.

    Raises `ModelFileError` if a class cannot be imported; the message names it.
    """
    if data is None:
        return pytree.treespec_leaf()
    name, context, branches = data
    kind = _class_of(name)
    if kind is None:
        raise ModelFileError(f"the model takes or returns {name}, which cannot be imported here")
    if is_dataclass(kind) and isinstance(kind, type) and kind not in pytree.SUPPORTED_NODES:
        torch.export.register_dataclass(kind)
    if pytree.is_namedtuple_class(kind):
        kind, context = namedtuple, kind
    return pytree.TreeSpec(kind, context, [tree_of(each) for each in branches])


def _class_of(name: str) -> Any:
    """Return a class by the name of its module and its own; None if there is none."""
    module, _, path = name.partition(":")
    try:
        found: Any = import_module(module)
        for each in path.split("."):
            found = getattr(found, each)
    except (ImportError, AttributeError, ValueError):
        return None
    return found if isinstance(found, type) else None
