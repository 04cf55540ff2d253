"""Optional packages, imported when first needed."""

from __future__ import annotations

import importlib
from typing import Any


def require(module: str, extra: str | None, purpose: str) -> Any:
    """Import an optional module.

    Raises:
        ImportError: it is not installed; the message says what needs it and how to get it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name not in (module, module.split(".")[0]):
            raise
        how = f"pip install 'dspark-jax[{extra}]' (in a clone: '.[{extra}]')" if extra else f"pip install {module}"
        raise ImportError(f"{purpose} needs {module.split('.')[0]}, which is not installed: {how}") from None
