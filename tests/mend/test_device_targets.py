"""Modules with virtual devices: what runs where, and that they compile and compute right."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax, tirx

from relax_fusion import PATTERNS, FuseOptions, Reason, Report, make_target
from relax_fusion.options import make_options
from relax_fusion.pipeline import PHASES

from ..support.quick import quickly

H200 = make_target("h200")
CUDA = '{"kind": "cuda", "arch": "sm_90a"}'


def module(devices: str, body: str) -> tvm.IRModule:
    """Return a module whose function takes tensors of both devices, a and b."""
    text = f"""
@I.ir_module
class Module:
    I.module_attrs({{"mine": 5}})
    I.module_global_infos({{"vdevice": [{devices}]}})
    @R.function
    def main(x: R.Tensor((8, 64), "float32", A), w: R.Tensor((64, 64), "float32", A),
             p: R.Tensor((8, 64), "float32", B), q: R.Tensor((64, 64), "float32", B)):
        with R.dataflow():
{"".join(f"            {line.strip()}{chr(10)}" for line in body.strip().splitlines())}
            R.output(y)
        return y
"""
    kinds = ("cuda:0", "llvm:0") if "cuda" in devices else ("llvm:0", "llvm:1")
    return tvm.script.from_source(
        text.replace(" A)", f' "{kinds[0]}")').replace(" B)", f' "{kinds[1]}")')
        .replace("@A", f'"{kinds[0]}"').replace("@B", f'"{kinds[1]}"')
    )  # fmt: skip


HOSTS = 'I.vdevice("llvm", 0), I.vdevice("llvm", 1)'
BOTH = f'I.vdevice({CUDA}, 0), I.vdevice("llvm", 0)'
BODY = """
    a = R.nn.relu(R.matmul(x, w))
    b = R.nn.relu(R.matmul(p, q))
    c = R.nn.softmax(b)
    d = R.exp(R.add(c, c))
    e = R.to_vdevice(d, @A)
    f = R.nn.silu(R.matmul(R.add(a, e), w))
    y = R.to_vdevice(f, @B)
"""


def test_two_hosts_compute_right() -> None:
    mod = module(HOSTS, BODY)
    pipeline = relax.get_pipeline("relax_fusion", target="llvm")
    built = quickly(mod, pipeline)
    vm = relax.VirtualMachine(built, [tvm.cpu(), tvm.cpu()])
    rng = np.random.default_rng(0)
    x, w, p, q = (rng.standard_normal(s, "float32") / 8 for s in ((8, 64), (64, 64)) * 2)
    got = vm["main"](*map(tvm.runtime.tensor, (x, w, p, q))).numpy()
    b = np.exp(np.maximum(p @ q, 0))
    f = (np.maximum(x @ w, 0) + np.exp(2 * b / b.sum(-1, keepdims=True))) @ w
    np.testing.assert_allclose(got, f / (1 + np.exp(-f)), rtol=1e-5, atol=1e-5)


def places(mod: tvm.IRModule) -> dict[str, str]:
    """Return the kind of target of every PrimFunc that a Relax function calls."""
    funcs = {g.name_hint: f for g, f in mod.functions_items() if isinstance(f, tirx.PrimFunc)}
    return {n: (f.attrs or {}).get("target", H200).kind.name for n, f in funcs.items()}


@pytest.mark.parametrize("hinted", [False, True])
def test_functions_are_compiled_for_the_device_of_their_tensors(hinted: bool) -> None:
    hint = 'R.hint_on_device(d, R.device("cuda", 0), "global")'
    hints = BODY.replace("R.to_vdevice(d, @A)", hint).replace("R.add(a, e)", "R.exp(e)")
    mod = module(BOTH, hints if hinted else BODY)
    report = Report()
    options = make_options(H200, {"report": report, "backend": "tir"})
    with H200:
        for number, (_, phase, _) in enumerate(PHASES):
            for step in phase(options):
                mod = step(mod)
                assert int(mod.attrs["mine"]) == 5, step.info.name
                assert len(mod.global_infos["vdevice"]) == 2, step.info.name
            if number == 3:
                found = places(mod)
    host = {n for n, kind in found.items() if kind == "llvm"}
    assert len(host) == 2 and any("matmul" in n for n in host), found
    assert any("softmax" in n and "exp" in n for n in host), found
    assert {"cuda", "llvm"} == set(found.values())
    assert {s.rule for s in report.schedules if s.function in host} == {
        "GenericMatmulRule", "NormRule",
    }  # fmt: skip
    declines = [d.decline for d in report.decisions if d.decline is not None]
    assert [d.detail for d in declines if d.reason is Reason.VDEVICE]
    library = tvm.compile(mod, H200, relax_pipeline=tvm.transform.Sequential([])).mod
    (host_code,) = library.imports
    (kernels,) = host_code.imports
    assert not [n for n in host if f"{n}_kernel" in kernels.inspect_source()]


@pytest.mark.parametrize("target", ["llvm", "h200"])
def test_chains_are_fused_on_the_devices_of_the_target_only(target: str) -> None:
    mod = module(BOTH, "a = R.nn.relu(R.matmul(x, w)); y = R.nn.relu(R.matmul(p, q))")
    decisions: list = []
    options = FuseOptions(make_target(target), decisions=decisions, always_fuse=True)
    out = PATTERNS["FuseMatmulEpilogue"](options)(mod)
    made = [b.value for b in out["main"].body.blocks[0].bindings]
    kernels = [v for v in made if isinstance(v, relax.Call) and v.op.name == "relax.call_tir"]
    (place,) = [k.ty_args[0].vdevice.target.kind.name for k in kernels]
    assert place == make_target(target).kind.name
    (refused,) = [d.decline for d in decisions if d.decline is not None]
    assert refused.reason is Reason.VDEVICE and f"memory of {place}" in refused.detail
