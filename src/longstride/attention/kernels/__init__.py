"""The same sums on a GPU, in Triton: jobs (what is computed where), forward and backward kernels, ops that join them."""
