"""Kernels that one device runs under a plan: their order, their time and the memory that they hold."""
