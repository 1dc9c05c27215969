"""Gluon kernels for Hopper GPUs, which copy tiles with TMA."""
