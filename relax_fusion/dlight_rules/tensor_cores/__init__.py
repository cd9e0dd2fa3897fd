"""Kernels for tensor cores, emitted instruction by instruction from the blocks of a PrimFunc.

=====================  =============================================================================
Products, many rows    `contraction` -> `mma_kernel` (sm_80), `wgmma_kernel` (sm_90a); `weights`,
                       `sums`, `epilogue`
Products, few rows     `contraction` -> `few_rows_kernel`, `few_rows_ring`, `few_rows_sums`; of
                       quantised weights `dequantised_rows`, `resident_row`; of those that
                       are streamed `streamed_row`, `streamed_ring`
Norms                  `contraction` (in front), `few_rows_kernel` (inside)
Quantised weights      `dequantise`, `dequantised`, `byte_pairs`
What all share         `tile` (what is computed, norms too), `layout` (instructions by type, and
                       where operands lie), `fragments` (registers, copies), `dependent` (launches
                       that overlap)
=====================  =============================================================================
"""
