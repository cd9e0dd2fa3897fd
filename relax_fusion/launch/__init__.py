"""Launching compiled kernels from a library of TVM's: nothing here knows who compiled them.

- :mod:`.kernel`: `CompiledKernel`, an image and what it takes to launch it;
- :mod:`.arguments`: what a kernel is handed;
- :mod:`.prim_func`, :mod:`.branches`, :mod:`.body`: the PrimFunc that launches;
- :mod:`.cuda_kernels`, :mod:`.cuda_source`, :mod:`.nvrtc`: TVM's own CUDA kernels, compiled ahead
  of time; :mod:`.cache`: compiled kernels on disk;
- :mod:`.launcher`: the C code that launches, as a part of the library.

Each module is imported by its name.
"""
