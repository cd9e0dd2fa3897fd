"""Stands for MLC-LLM: the modules and passes that `relax_fusion.mlc` touches, and nothing else.

Like the real one, it cannot be imported where its native library is missing.
"""

from .libinfo import find_lib_path

LIBRARY = find_lib_path("mlc_llm_module")
