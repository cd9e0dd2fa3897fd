"""Workloads as JSON and as keys."""

from __future__ import annotations

import pickle
from dataclasses import fields, replace

import pytest

from relax_fusion.errors import LoweringError
from relax_fusion.workload import Attention, DynamicDim, Heads, NormMatmul, Projection, Rope
from relax_fusion.workload.json import from_json, to_json

from ..support.estimator_cases import WORKLOADS

ROPE = Rope(64, 512, "float32", DynamicDim("seq", 4096))
ROTATED = NormMatmul(
    DynamicDim("rows"),
    256,
    (Projection(768, "nk", ("bias",), ROPE), Projection(256, "kn")),
    None,
    "float16",
    "float16",
)
OTHERS = {
    "rotated": ROTATED,
    "static_positions": replace(
        ROTATED, outputs=(Projection(768, "nk", (), replace(ROPE, positions=7)),)
    ),
    "own_row": replace(
        ROTATED, outputs=(Projection(768, "nk", (), replace(ROPE, positions=None)),)
    ),
    "merged_heads": Attention(
        *(1, 2, 3, 4, 2, 8, 8, 1.0, "none", None, "float16", "float16"),
        q_in=Heads(8),
        k_in=Heads(8, 4, 2),
        shared=3,
    ),
}


@pytest.mark.parametrize("work", [*WORKLOADS.values(), *OTHERS.values()], ids=[*WORKLOADS, *OTHERS])
def test_json_keeps_every_field(work) -> None:
    assert from_json(to_json(work)) == work
    text = to_json(work).replace("{", '{"windw": 4, ', 1)
    with pytest.raises(LoweringError, match="there is no field 'windw'"):
        from_json(text)


def test_every_field_of_a_rotation_is_in_the_key() -> None:
    ropes = [
        None,
        ROPE,
        replace(ROPE, head_dim=128),
        replace(ROPE, features=768),
        replace(ROPE, dtype="float16"),
        replace(ROPE, positions=None),
        replace(ROPE, rotary_dim=32),
        replace(ROPE, pairing="neighbours"),
        replace(ROPE, period=512),
        replace(ROPE, by_pair=True),
    ]
    works = [replace(ROTATED, outputs=(Projection(768, "nk", (), rope),)) for rope in ropes]
    assert len({work.key for work in works}) == len(ropes)


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_pickle_has_the_fields_alone(name: str) -> None:
    """A hash that was kept would be another one in another process."""
    work = WORKLOADS[name]
    assert hash(work) == hash(replace(work)) and work.graph
    loaded = pickle.loads(pickle.dumps(work))
    assert set(vars(loaded)) == {field.name for field in fields(work)}
    assert loaded == work and hash(loaded) == hash(work)
