"""Attributes, extra functions and metadata that are attached to a module."""

from __future__ import annotations

import json

import pytest
import tvm

from relax_fusion import PipelineError
from relax_fusion.transforms.annotate import (
    AttachAdditionalPrimFuncs,
    AttachFunctionAttrs,
    AttachMetadata,
    UnknownVariableWarning,
)

from ..support.chains import Chain, module

MOD = module([Chain(n, "x[n,4]", "y = R.nn.relu(x)", "y") for n in ("prefill", "decode")])


def test_bounds_of_unknown_variables_warn_and_those_beyond_64_bits_are_refused() -> None:
    with pytest.warns(
        UnknownVariableWarning, match="names 'seq', which no function has; they have"
    ):
        AttachFunctionAttrs({"seq": 8}, {}).transform_module(MOD, None)
    square = module([Chain("main", "x[n,4] w[4,n]", "y = R.matmul(x, w)", "y")])
    with pytest.raises(PipelineError, match=r"y, of shape \[n, n\], \d+ elements; at most"):
        AttachFunctionAttrs({"n": 2**31 - 1}, {}).transform_module(square, None)
    AttachFunctionAttrs({"n": 2**29}, {}).transform_module(square, None)


def test_nothing_to_attach_changes_nothing() -> None:
    for made in (AttachFunctionAttrs({}, {}), AttachAdditionalPrimFuncs({}), AttachMetadata({})):
        assert made(MOD).same_as(MOD)


def test_a_taken_name_is_refused() -> None:
    with pytest.raises(PipelineError, match="'decode'"):
        AttachAdditionalPrimFuncs({"decode": None}).transform_module(MOD, None)


def test_metadata_is_json() -> None:
    out = AttachMetadata({"a": [1, "ü"]})(MOD)
    body = out["_metadata"].body.body
    tvm.relax.analysis.well_formed(out)
    text = json.loads(body.value) if hasattr(body, "value") else None
    assert text is None or text["a"] == [1, "ü"]
