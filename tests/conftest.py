"""Shared settings of the tests: CPU unless the caller chose a platform; fixtures for the bundled reference files."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import pathlib

import pytest
from helpers import CHECKPOINTS, GOLDENS


@pytest.fixture(scope="session")
def goldens() -> pathlib.Path:
    """The folder of reference outputs."""
    return GOLDENS


@pytest.fixture(scope="session")
def checkpoints() -> pathlib.Path:
    """The folder of bundled trained checkpoints."""
    return CHECKPOINTS
