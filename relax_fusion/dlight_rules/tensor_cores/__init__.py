"""Kernels for tensor cores, emitted instruction by instruction from the blocks of a PrimFunc.

=====================  =============================================================================
Products, many rows    `contraction` -> `mma_kernel` (sm_80), `wgmma_kernel` (sm_90a); `weights`,
                       `sums`, `epilogue`
Products, few rows     `few_rows` -> `few_rows_kernel`, `few_rows_ring`, `few_rows_sums`;
                       `decoded_rows`
Norms                  `norm_rows` in front, `normed_rows` inside, read by `row_norm`
Quantised weights      `decode`, `decoded`, `decoded_tile`
What all share         `tile` (what is computed), `layout` (where it lies), `instructions` (by
                       type), `fragments` (of ``mma.m16n8``), `dependent` (launches that overlap)
=====================  =============================================================================
"""
