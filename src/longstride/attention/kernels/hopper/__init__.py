"""Gluon kernels for Hopper GPUs, which the tensor copy engine feeds."""
