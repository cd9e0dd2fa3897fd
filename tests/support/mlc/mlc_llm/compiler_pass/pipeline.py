"""The pipeline that MLC-LLM registers."""

from tvm.relax import register_pipeline

from .passes import *  # noqa: F403


@register_pipeline("mlc_llm")
def _mlc_llm_pipeline(target, **arguments):
    raise AssertionError("MLC-LLM's own pipeline was asked for")
