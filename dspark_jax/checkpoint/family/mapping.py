"""From the names in a file to canonical names, through the rows of its family."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable

from ...head_kinds import MARKOV_PREFIX
from . import names as canonical_names
from .table import Family


@dataclasses.dataclass
class Mapped:
    """Where each source tensor goes.

    Attributes:
        sources: canonical name -> source name.
        scales: canonical name -> source name of its block scales.
        borrowed: canonical names whose source belongs to the target in whose shards the drafter lives.
        left_out: source name -> the named reason.
        problems: one sentence per unknown name and per name that is spelled twice.
    """

    sources: dict[str, str]
    scales: dict[str, str]
    borrowed: set[str]
    left_out: dict[str, str]
    problems: list[str]


def strip_prefixes(name: str, prefixes: tuple[str, ...]) -> str:
    """Remove leading wrapper prefixes, in any order."""
    if not name.startswith(prefixes):
        return name
    while prefix := next((p for p in prefixes if name.startswith(p)), None):
        name = name[len(prefix) :]
    return name


def count_stages(names: Iterable[str]) -> int:
    """Count the stages mtp.0, mtp.1, ... of a drafter that lives inside its target's shards."""
    return len({match[1] for name in names if (match := re.match(r"(?:_orig_mod\.)?mtp\.(\d+)\.", name))})


def map_names(family: Family, names: Iterable[str]) -> Mapped:
    """Send every source name through the family's table."""
    ordered = sorted(names)
    last = str(count_stages(ordered) - 1)
    patterns = [rule.pattern.replace("<last>", last) for rule in family.rules]
    rules = [(re.compile(pattern), rule) for pattern, rule in zip(patterns, family.rules, strict=True)]
    known = re.compile("|".join(f"(?:{pattern})" for pattern in patterns))  # one look at names that no row knows
    result = Mapped({}, {}, set(), {}, [])
    fallbacks: dict[str, str] = {}
    for source in ordered:
        stripped = strip_prefixes(source, family.prefixes)
        match = rule = None
        if known.fullmatch(stripped):
            match, rule = next((m, rule) for regex, rule in rules if (m := regex.fullmatch(stripped)))
        canonical = None if match is None or rule is None or rule.canonical is None else match.expand(rule.canonical)
        if canonical is not None and canonical.startswith(MARKOV_PREFIX) and not canonical_names.is_head(canonical):
            match = None  # no registered kind of head has it
        if match is None or rule is None:
            result.problems.append(f"{source}: unknown tensor of the {family.name} family")
            continue
        if canonical is None:
            result.left_out[source] = rule.reason
            continue
        place = fallbacks if rule.fallback else result.scales if rule.scale else result.sources
        if canonical in place:
            result.problems.append(f"{source}: second spelling of {canonical}, which {place[canonical]} gives as well")
        place[canonical] = source
    for canonical, source in fallbacks.items():
        if canonical in result.sources:
            result.left_out[source] = "tensor of the target; the drafter has its own"
        else:
            result.sources[canonical] = source
            result.borrowed.add(canonical)
    result.problems += [
        f"{source}: scales of {canonical}, which is missing"
        for canonical, source in result.scales.items()
        if canonical not in result.sources
    ]
    return result
