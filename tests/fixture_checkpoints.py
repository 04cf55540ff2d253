"""What the checkpoint tests share: the fixture script, and changing a fixture byte by byte.

Nothing here uses the library, so a test compares it with an independent reading and writing of the files.
"""

import importlib.util
import json
import pathlib
import zlib
from typing import Any

import ml_dtypes
import numpy as np
from helpers import TESTS

_spec = importlib.util.spec_from_file_location("make_fixtures", TESTS.parent / "scripts" / "make_fixtures.py")
assert _spec is not None
assert _spec.loader is not None
fixtures = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(fixtures)

NUMPY = {
    "BF16": ml_dtypes.bfloat16, "F16": np.float16, "F32": np.float32, "F64": np.float64, "I64": np.int64,
    "I8": np.int8, "U8": np.uint8, "BOOL": np.uint8, "F8_E4M3": np.uint8, "F8_E8M0": np.uint8,
}  # fmt: skip


def make(name: str, directory: pathlib.Path, **options: Any) -> pathlib.Path:
    """Write one fixture of the script, with the same weights whatever was made before it."""
    fixtures.RNG = np.random.default_rng(zlib.crc32(name.encode()))
    makers = fixtures.FAMILIES | fixtures.REFUSED | fixtures.TARGETS
    return makers[name](directory / name, **options)


def read_file(path: pathlib.Path) -> dict[str, tuple[str, np.ndarray]]:
    """Read a safetensors file by hand: name -> (header dtype, raw array)."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    tensors = {}
    for name, entry in header.items():
        if name != "__metadata__":
            start, stop = entry["data_offsets"]
            raw = np.frombuffer(data[8 + size + start : 8 + size + stop], NUMPY[entry["dtype"]])
            tensors[name] = (entry["dtype"], raw.reshape(entry["shape"]))
    return tensors


def change_tensors(directory: pathlib.Path, change: Any) -> pathlib.Path:
    """Rewrite a single-file checkpoint after `change(tensors)` edited its dictionary in place."""
    path = directory / "model.safetensors"
    tensors = read_file(path)
    change(tensors)
    fixtures.write_file(path, tensors)
    return directory


def change_config(directory: pathlib.Path, change: Any = None, **keys: Any) -> pathlib.Path:
    """Set keys of config.json (None removes one), or edit it with `change(config)`."""
    path = directory / "config.json"
    config = json.loads(path.read_text())
    if change is not None:
        change(config)
    config |= keys
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None or key not in keys}))
    return directory


def header_file(path: pathlib.Path, header: Any, data: bytes = b"", length: int | None = None) -> pathlib.Path:
    """Write a safetensors file with any header (an object or bytes), claimed header length and data."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def e8m0(bits: np.ndarray) -> np.ndarray:
    """Decode E8M0 by hand, one value at a time."""
    return np.array([2.0 ** (int(b) - 127) for b in bits.reshape(-1)]).reshape(bits.shape)


def e4m3(bits: np.ndarray) -> np.ndarray:
    """Decode E4M3 (finite, no infinities) by hand: sign, 4 exponent bits of bias 7, 3 mantissa bits."""
    sign = np.where(bits & 0x80, -1.0, 1.0)
    exponent, mantissa = (bits >> 3) & 15, bits & 7
    normal = (1 + mantissa / 8) * 2.0 ** (exponent.astype(int) - 7)
    return sign * np.where(exponent == 0, mantissa / 8 * 2.0**-6, normal)


def e2m1(nibbles: np.ndarray) -> np.ndarray:
    """Decode E2M1 by hand: sign, 2 exponent bits of bias 1, 1 mantissa bit."""
    sign = np.where(nibbles & 8, -1.0, 1.0)
    exponent, mantissa = (nibbles >> 1) & 3, nibbles & 1
    return sign * np.where(exponent == 0, mantissa / 2, (1 + mantissa / 2) * 2.0 ** (exponent.astype(int) - 1))
