"""Drafting: heads, candidates, the scan over the steps, and the entry points that jit it."""
