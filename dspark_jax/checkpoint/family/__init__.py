"""Families of checkpoints: how each is recognised, what its tensors and config keys are called."""
