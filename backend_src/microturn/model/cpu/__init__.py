"""The model on a CPU: layers, matrix products (float32, int8, AMX) and native paged attention in Numba and LLVM.

Open `loading` first, then `layers` (a pass over the layers) and `attention` (the algorithm of paged attention). Kernels
are in `*_kernels`, their inner loops in `*_products`, built from the blocks in `vectors`.
"""
