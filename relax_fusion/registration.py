"""The pipeline among those of TVM, without importing either of them.

``relax.get_pipeline("relax_fusion")`` finds it wherever both packages are imported, in any order.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_PIPELINES = "tvm.relax.pipeline"
"""The module that has TVM's pipelines."""


def register_pipeline() -> None:
    """Register the pipeline, now if TVM is imported, and otherwise when it will be."""
    if _PIPELINES in sys.modules:
        _register(sys.modules[_PIPELINES])
    else:
        sys.meta_path.insert(0, _Registration())


class _Registration(MetaPathFinder):
    """Lets others find the module, and has it register the pipeline when it was executed."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return what others find of TVM's module; of others None."""
        if name != _PIPELINES:
            return None
        others = (each for each in sys.meta_path if each is not self)
        found = (each.find_spec(name, path, target) for each in others)
        spec = next((each for each in found if each is not None), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_register(module: ModuleType) -> None:
                execute(module)
                _register(module)

            spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec


def _register(pipelines: ModuleType) -> None:
    if "relax_fusion" not in pipelines.PIPELINE_MAP:
        pipelines.register_pipeline("relax_fusion")(_pipeline)


def _pipeline(*args: Any, **kwargs: Any) -> Any:
    """Make the pipeline by `relax_fusion.relax_fusion_pipeline`, which takes the arguments."""
    from .pipeline import relax_fusion_pipeline

    return relax_fusion_pipeline(*args, **kwargs)
