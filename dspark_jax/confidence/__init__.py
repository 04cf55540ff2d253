"""Confidence: records of acceptance, calibration, cost tables, and how much of a block to verify."""
