"""Tokenizers, prompt files and text that grows token by token: what the commands that generate share."""

from __future__ import annotations

import os
from typing import Any

from ..json_files import read_json, read_json_lines


def load_tokenizer(directory: str) -> Any:
    """Return the tokenizer of a directory's tokenizer.json.

    Raises:
        ImportError: the tokenizers package is missing; FileNotFoundError, ValueError: the file is, or is malformed.
    """
    path = os.path.join(directory, "tokenizer.json")
    if not os.path.isfile(path):
        raise FileNotFoundError(f"{path}: no such file; text needs the target's tokenizer.json")
    return read_tokenizer(path)


def read_tokenizer(path: str) -> Any:
    """Return the tokenizer of a tokenizer.json; errors as in load_tokenizer."""
    try:
        import tokenizers
    except ImportError:
        raise ImportError(
            "text needs the tokenizers package: pip install 'dspark-jax[cli]' (in a clone: '.[cli]')"
        ) from None
    try:
        return tokenizers.Tokenizer.from_file(path)
    except Exception as error:  # the library raises plain Exception for a malformed file
        raise ValueError(f"{path}: not a tokenizer.json ({error})") from None


def read_prompts(path: str, tokenizer_directory: str, limit: int | None = None) -> list[list[list[int]]]:
    """Read prompts, one JSON object a line: the turns of each conversation as token ids.

    A line has `prompt_ids` (token ids: one turn) or `turns` (texts, as in DeepSpec's evaluation sets), which are
    tokenised as they are; bring a chat template along as token ids.

    Args:
        tokenizer_directory: where tokenizer.json lies; opened only for texts.
        limit: read this many lines at most.

    Raises:
        ValueError: a line that is neither; the message names the file and the line.
    """
    tokenizer, conversations = None, []
    for number, entry in read_json_lines(path):
        if limit is not None and len(conversations) >= limit:
            break
        ids, turns = (entry.get("prompt_ids"), entry.get("turns")) if isinstance(entry, dict) else (None, None)
        if isinstance(ids, list) and ids and all(type(i) is int for i in ids):
            conversations.append([ids])
        elif isinstance(turns, list) and turns and all(isinstance(t, str) and t for t in turns):
            tokenizer = tokenizer or load_tokenizer(tokenizer_directory)
            conversations.append([tokenizer.encode(turn).ids for turn in turns])
        else:
            raise ValueError(f'{path}, line {number}: expected {{"prompt_ids": [token ids]}} or {{"turns": [texts]}}')
    if not conversations:
        raise ValueError(f"{path}: found no prompts, expected one JSON object a line")
    return conversations


def read_stop_ids(directory: str) -> list[int]:
    """Return the end-of-text ids that the target's generation_config.json or config.json names."""
    for name in ("generation_config.json", "config.json"):
        path = os.path.join(directory, name)
        if os.path.lexists(path) and (found := read_json(path).get("eos_token_id")) is not None:
            ids = found if isinstance(found, list) else [found]
            if not all(type(i) is int and 0 <= i < 2**31 for i in ids):
                raise ValueError(f"{path}: eos_token_id: found {str(found)[:100]}, expected token ids")
            return ids
    return []


class TextStream:
    """Turns token ids that arrive one by one into text, holding back bytes that are no whole character yet."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.pending: list[int] = []

    def push(self, ids: list[int], *, last: bool = False) -> str:
        """Return the text that the tokens add; `last` gives out what is held back as well."""
        self.pending += ids
        text = self.tokenizer.decode(self.pending, skip_special_tokens=False)
        if text.endswith("\ufffd") and not last:
            return ""
        self.pending = []
        return text
