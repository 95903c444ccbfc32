"""Triton kernels, and the plain-torch references that define what each computes."""
