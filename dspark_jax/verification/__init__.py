"""Verification: the target's filters, both distributions, and the lossless accept-or-resample step."""
