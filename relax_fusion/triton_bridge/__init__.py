"""The seam for ahead-of-time Triton kernels: ``call_tir_extern``, launch ABI and kernels go here.

Nothing is here yet; the pipeline refuses ``backend="triton"`` and emits TIR.
"""
