"""Targets whose host code is not optimised: half the time to compile, for tests of what it does."""

from __future__ import annotations

from tvm.target import Target

from relax_fusion.target import host_target


def quick(target: Target) -> Target:
    """Return `target` without LLVM's optimisations, on its host if it is a device."""
    if target.kind.name == "llvm":
        return Target({**target.export(), "opt-level": 0})
    return target.with_host(quick(target.host or Target("llvm")))


def quick_host() -> Target:
    """Return this machine's processor, without LLVM's optimisations."""
    return quick(host_target())
