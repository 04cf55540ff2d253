"""Which modules the tests check against their shape annotations, and how (jaxtyping's import hook with beartype).

Hooked are the core functions: what computes on arrays of final shapes and dtypes. Outside stay the entry points, which
take array-likes and whose own errors come first, and the constructors of dataclasses: JAX builds registered ones from
whatever it maps over, such as object() or None, when it works on their leaves.
"""

import jaxtyping
from beartype import beartype

HOOKED = [
    f"dspark_jax.{name}"
    for name in (
        "noise",
        "linear",
        "markov",
        "kernels",
        "confidence.schedule",
        "transformer",
        "verification.filter",
        "verification.distributions",
        "verification.block_rule",
        "verification.verify",
        "drafting.heads",
        "drafting.confidence_head",
        "drafting.head",
        "drafting.rows",
        "drafting.split_rows",
        "drafting.candidates",
        "drafting.continuations",
        "drafting.steps",
        "drafting.union_steps",
        "drafting.draft",
        "decoding.loop",
        "decoding.processors",
    )
]


def check(function):
    """Let beartype check a function's arguments and result; constructors are left alone."""
    return function if function.__name__ == "__init__" else beartype(function)


def install():
    """Hook the modules; nothing of the package may be imported yet."""
    jaxtyping.install_import_hook(HOOKED, "type_checks.check")
