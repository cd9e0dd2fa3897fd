"""Triton kernels of normalised and gated matmuls, and of attention.

A family is one file.  Which serves which number of rows of a matmul (its maths is in ``math``),
beside CUDA C++ on Hopper:

=====================  ===========================  ================================================
file                   rows                         what runs before or after it
=====================  ===========================  ================================================
``gemv``               1, and 2 where weights have  nothing: it normalises its rows itself
                       few bits
``matmul_pointer``     2 to 128, and all on a GPU   ``row_norm`` before it, or up to 16 rows nothing
                       without tensor map copies    (RMSNorm rides along); ``split_reduce`` after a
                                                    split of k
=====================  ===========================  ================================================

Which serves which attention (what they share is in ``attention_core``):

=====================  ===========================  ================================================
file                   queries and keys             what runs after it
=====================  ===========================  ================================================
``attention_pointer``  few queries, and all on a    ``attention_combine`` where the keys are cut
                       GPU that is not Hopper       into parts
``attention_flash``    many queries, on sm_90       nothing
``attention_groups``   up to 512 keys, few rows, on nothing
                       sm_90
``attention_halves``   up to 512 keys, more rows,   nothing
                       on sm_90
=====================  ===========================  ================================================

Every tensor is compact and row-major; those of attention have strides.  Sizes that a model fixes
(features) are constexprs, so that masks vanish where tiles divide them and Triton sees the
alignment of rows; numbers of rows and of keys are run-time arguments.  A pointer
that a constexpr switches off may be None, or any pointer.  `pdl` (programmatic dependent launch,
sm_90 on) makes a kernel wait for its predecessor itself.
"""
