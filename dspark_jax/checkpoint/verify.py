"""`verify`: does a conversion say what its source says? Read again by other code, drafted by another implementation."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import numpy as np

from .hub import local_path
from .load import build_head
from .manifest import changed_json, read_manifest
from .open import Checkpoint, open_checkpoint
from .storage.orbax_tree import is_orbax
from .storage.write import digest
from .torch_reference import TorchHead, TorchSource

# Of the largest logit: products of a few thousand float32 terms in two orders of summation.
TOLERANCE = 1e-5


@dataclasses.dataclass(frozen=True)
class Verification:
    """What was compared, and how far apart the two sides are.

    Attributes:
        tensors: number of tensors of the result that were compared with the source.
        problems: one sentence per tensor that differs or is unaccounted for.
        blocks, steps: size of the random draft.
        with_lm_head: whether an LM head made the base logits; without one they were random.
        logit_error, confidence_error: largest absolute differences (confidence None without that head).
        tolerance: the largest allowed ones.
        token_agreement: share of equal tokens.
        unexplained: tokens that differ although the two best logits are further apart than the tolerance.
    """

    tensors: int
    problems: list[str]
    blocks: int
    steps: int
    with_lm_head: bool
    logit_error: float
    confidence_error: float | None
    tolerance: float
    token_agreement: float
    unexplained: int

    @property
    def passed(self) -> bool:
        """Whether the conversion is right."""
        errors = max(self.logit_error, self.confidence_error or 0.0)
        # NaN compares false, so it fails.
        return not self.problems and self.unexplained == 0 and errors <= self.tolerance


def verify(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    target: str | os.PathLike[str] | None = None,
    blocks: int = 8,
    seed: int = 0,
) -> Verification:
    """Compare a conversion with its source, tensor by tensor and by drafting random hidden states.

    Args:
        source: the checkpoint that was converted.
        destination: the result of `convert`.
        target: the target's directory, where the embedding or LM head came from it.
        blocks: random blocks to draft.
        seed: of the random hidden states.

    Raises:
        ImportError: PyTorch is not installed.
        ValueError, FileNotFoundError: one of the two cannot be read.
    """
    target = None if target is None else os.fspath(target)
    checkpoint = open_checkpoint(destination)
    manifest = read_manifest(checkpoint.path)
    head_only = manifest.get("head_only") is True
    path = local_path(source, head_only=head_only)
    if is_orbax(path):
        raise ValueError(f"{path}: an Orbax tree, expected the safetensors checkpoint that was converted")
    open_checkpoint(path, head_only=head_only)  # a damaged source is refused with the reader's own words
    torch_source = TorchSource(path)
    problems = changed_json(checkpoint.path, manifest, checkpoint.raw) + _account(torch_source, manifest)
    problems += _compare_facts(torch_source, checkpoint)
    problems += _compare_tensors(torch_source, checkpoint, manifest, target)
    return _draft(torch_source, checkpoint, manifest, target, problems, blocks, seed)


def _account(source: TorchSource, manifest: dict[str, Any]) -> list[str]:
    """Every tensor of the source is written or left out for a reason."""
    known = manifest["sources"]
    problems = [f"{name}: in the source, but not in the manifest" for name in source.names if name not in known]
    problems += [f"{name}: in the manifest, but not in the source" for name in known if name not in set(source.names)]
    return problems


def _compare_facts(source: TorchSource, checkpoint: Checkpoint) -> list[str]:
    """Compare what no draft of the head shows: the block, the layers it reads, and the backbone's arithmetic."""
    wanted, found = source.facts(), checkpoint.raw
    return [
        f"config.json: {key}: {str(found.get(key))[:80]}, the source says {str(value)[:80]}"
        for key, value in wanted.items()
        if value is not None and found.get(key) != value
    ]


def _compare_tensors(
    source: TorchSource, checkpoint: Checkpoint, manifest: dict[str, Any], target: str | None
) -> list[str]:
    torch, problems = source.torch, []
    there = None if target is None else TorchSource(target)
    if set(checkpoint.names) != set(manifest["tensors"]):
        different = sorted(set(checkpoint.names) ^ set(manifest["tensors"]))
        problems.append(f"{', '.join(different)}: in only one of manifest and files")
    for name, entry in manifest["tensors"].items():
        if name not in checkpoint:
            continue
        array = checkpoint.get(name)
        if digest([array]) != entry["sha256"]:
            problems.append(f"{name}: its bytes are not those that were written (checksum)")
        files = source if all(map(source.has, entry["sources"])) and entry["transform"] != "rows" else there
        if files is None:
            continue  # it came from a target that is not given now; its checksum was compared
        wanted = files.decode(entry["sources"])
        if entry["transform"] == "rows":
            wanted = wanted[source.read("d2t") + torch.arange(array.shape[0])]
        found = _to_torch(torch, array)
        wanted = wanted.to(found.dtype)
        if found.shape != wanted.shape or not torch.equal(found.view(torch.uint8), wanted.view(torch.uint8)):
            problems.append(f"{name}: differs from {' with '.join(entry['sources'])} of the source")
    return problems


def _to_torch(torch: Any, array: np.ndarray) -> Any:
    array = np.array(array, order="C")  # a copy of its own: mapped files are read-only
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _draft(
    source: TorchSource,
    checkpoint: Checkpoint,
    manifest: dict[str, Any],
    target: str | None,
    problems: list[str],
    blocks: int,
    seed: int,
) -> Verification:
    """Draft random blocks with both heads; without any LM head, from random base logits."""
    from ..drafting.api import draft_block, draft_from_logits

    torch, config = source.torch, checkpoint.config
    cast = {"bf16": torch.bfloat16, "f32": torch.float32}.get(str(manifest.get("dtype")))
    reference = TorchHead(source, target, lambda tensor: tensor if cast is None else tensor.to(cast))
    if target is not None:
        checkpoint = open_checkpoint(checkpoint.path, target, head_only=True)
    head = build_head(checkpoint, "float32")
    rng, steps = np.random.default_rng(seed), config.max_steps
    hidden = rng.standard_normal((blocks, steps, config.hidden_size)).astype(np.float32)
    anchors = rng.integers(0, config.vocab_size, blocks).astype(np.int32)
    base = None
    if head.lm_head is None or reference.lm_head is None:
        base = rng.standard_normal((blocks, steps, config.Vd)).astype(np.float32)
    with torch.no_grad():
        given = None if base is None else torch.from_numpy(base)
        tokens, logits, confidence = reference.draft(torch.from_numpy(hidden), torch.from_numpy(anchors).long(), given)
        logits = logits[..., : config.vocab_size]  # columns beyond are padding, which is never drafted
        best = logits.topk(min(2, logits.shape[-1]), -1).values.numpy()
    if base is None:
        block = draft_block(head, hidden, anchors, outputs="logits")
    else:
        block = draft_from_logits(head, base.transpose(1, 0, 2), anchors, hidden=hidden, outputs="logits")
    tolerance = TOLERANCE * max(1.0, float(logits.abs().max()))
    same = np.asarray(block.tokens) == tokens.numpy()
    # A row depends on the tokens before it, so rows count as long as the two walks agree; a walk may part only where
    # the two best logits are closer than the tolerance.
    comparable = np.concatenate([np.ones((blocks, 1), bool), np.logical_and.accumulate(same, axis=1)[:, :-1]], axis=1)
    clear = best[..., 0] - best[..., -1] > 2 * tolerance
    columns = slice(logits.shape[-1]) if reference.table is None else reference.table.numpy()
    assert block.logits is not None
    found = np.asarray(block.logits, np.float32).transpose(1, 0, 2)[..., columns]
    errors = np.abs(found - logits.numpy()).max(axis=-1)
    confidence_error = None
    if (confidence is None) != (block.confidence_logits is None):
        problems = [*problems, "confidence_head: in only one of source and result"]
    elif confidence is not None:
        difference = np.abs(np.asarray(block.confidence_logits, np.float32) - confidence.numpy())
        confidence_error = float(difference[comparable].max())
    return Verification(
        tensors=len(manifest["tensors"]),
        problems=problems,
        blocks=blocks,
        steps=steps,
        with_lm_head=base is None,
        logit_error=float(errors[comparable].max()),
        confidence_error=confidence_error,
        tolerance=tolerance,
        token_agreement=float(same.mean()),
        unexplained=int((~same & clear & comparable).sum()),
    )
