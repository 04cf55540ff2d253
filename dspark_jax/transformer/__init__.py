"""Transformers: geometry, caches, decoder layers, the drafter's backbone and the target."""
