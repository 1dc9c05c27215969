"""Triton kernels that make bytes."""
