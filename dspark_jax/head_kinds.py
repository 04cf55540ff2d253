"""The registry of Markov head kinds: what each is called, which weights it has, and what the rest may know of it.

Config, loader, shape checks, kernels and reports read kinds from here; the modules themselves live in drafting/heads.py
and register when they are imported. A kind of your own registers the same way (CONTRIBUTING.md shows one).
"""

from __future__ import annotations

import dataclasses
import importlib
import re
from collections.abc import Mapping
from typing import Any

from .checks import invalid

MARKOV_PREFIX = "markov_head."


@dataclasses.dataclass(frozen=True)
class HeadParameter:
    """One weight of a head.

    Attributes:
        attribute: the module's attribute, and the keyword of its constructor.
        tensor: canonical name in a checkpoint.
        shape: symbolic sizes, sums of multiples of V, Vd, H and r, such as "2r+H".
    """

    attribute: str
    tensor: str
    shape: tuple[str, ...]

    def sizes(self, symbols: Mapping[str, int]) -> tuple[int, ...]:
        """Return the shape for given sizes of V, Vd, H and r."""
        return tuple(evaluate(size, symbols) for size in self.shape)


# Every kind has the two tables of the Markov bias.
TABLES = (
    HeadParameter("markov_w1", MARKOV_PREFIX + "markov_w1.weight", ("V", "r")),
    HeadParameter("markov_w2", MARKOV_PREFIX + "markov_w2.weight", ("Vd", "r")),
)


@dataclasses.dataclass(frozen=True)
class HeadKind:
    """A kind of Markov head.

    Attributes:
        name: what configs call it (markov_head_type).
        module: its class, a MarkovHead.
        own: its parameters beside markov_w1 and markov_w2; their tensors tell it from other kinds.
        latent_is_embedding: whether z = e, so that kernels may look the latent up by the previous token.
        reads_hidden: whether its steps depend on hidden states.
    """

    name: str
    module: type[Any]
    own: tuple[HeadParameter, ...] = ()
    latent_is_embedding: bool = False
    reads_hidden: bool = True

    @property
    def parameters(self) -> tuple[HeadParameter, ...]:
        """All parameters, in the order of the constructor."""
        return TABLES + self.own


_KINDS: dict[str, HeadKind] = {}
_HOMES: dict[str, str] = {}


def register(kind: HeadKind) -> HeadKind:
    """Make a kind known; its module gets it as `kind`."""
    known = _KINDS.get(kind.name)
    if known is not None and known.module is not kind.module:
        raise invalid("HeadKind.name", kind.name, "a name that no other kind has")
    kind.module.kind = kind
    _KINDS[kind.name] = kind
    return kind


def declare(name: str, home: str) -> None:
    """Say which module registers a kind, so that it is imported when the kind is first asked for."""
    _HOMES.setdefault(name, home)


def names() -> tuple[str, ...]:
    """Return the known names, declared ones first."""
    return tuple(dict.fromkeys((*_HOMES, *_KINDS)))


def head_kind(name: str) -> HeadKind:
    """Return a kind by name; ValueError for one that nobody registered."""
    if name not in _KINDS and name in _HOMES:
        importlib.import_module(_HOMES[name])
    if name not in _KINDS:
        raise invalid("markov_head_type", name, "one of " + ", ".join(names()))
    return _KINDS[name]


def all_kinds() -> tuple[HeadKind, ...]:
    """Return all kinds, in the order of `names`."""
    return tuple(head_kind(name) for name in names())


def evaluate(size: str, symbols: Mapping[str, int]) -> int:
    """Return the value of a symbolic size: "1", "Vd", "3r" or "2r+H"."""
    total = 0
    for term in size.split("+"):
        match = re.fullmatch(r"(\d*)([A-Za-z]*)", term)
        if match is None or not term:
            raise invalid("shape", size, "a sum of terms such as 2r, H or 1")
        total += int(match[1] or 1) * (symbols[match[2]] if match[2] else 1)
    return total
