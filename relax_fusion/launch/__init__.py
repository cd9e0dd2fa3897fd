"""Launching compiled kernels from a library of TVM's: nothing here knows who compiled them.

- :mod:`.kernel`: `CompiledKernel`, an image and what it takes to launch it;
- :mod:`.arguments`, :mod:`.abi`: what a kernel is handed, and how machine code takes it;
- :mod:`.prim_func`, :mod:`.memory`, :mod:`.mixed`: the PrimFunc that makes launches;
- :mod:`.cuda_kernels`, :mod:`.cuda_source`, :mod:`.nvrtc`: TVM's own CUDA kernels, compiled ahead
  of time; :mod:`.cache`: compiled kernels on disk;
- :mod:`.embed`, :mod:`.launcher`: the C code that launches, as a part of the library.

Each module is imported by its name.
"""
