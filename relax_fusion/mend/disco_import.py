"""``tvm.runtime.disco``, which TVM's own import leaves as None."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import tvm_ffi


def disco() -> Any:
    """Return the module ``tvm.runtime.disco``, complete.

    ``import tvm`` imports it before the library with its functions is loaded, which fails; what was
    imported of it by then stays, and has none of these functions.  They are bound again here.
    """
    bound = import_module("tvm.runtime.disco._ffi_api")
    if not hasattr(bound, "SessionThreaded"):
        tvm_ffi.init_ffi_api("runtime.disco", bound.__name__)
    return import_module("tvm.runtime.disco")
