"""Kernels: exact selection, the dense step and the candidate walk; each beside a plain-XLA form."""
