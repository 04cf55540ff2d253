"""Chat templates: a user's text as the conversation that a target was trained on, by the tokenizer's own template."""

from __future__ import annotations

import datetime
import json
import os
from typing import Any

from ..json_files import read_bytes, read_json
from ..optional import require

MAX_TEMPLATE = 1 << 20  # bytes
SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")


def render_chat(directory: str, messages: list[dict[str, str]]) -> str:
    """Return the text of a conversation up to where the model answers, as transformers' apply_chat_template gives it.

    The template is untrusted code of the checkpoint: it runs in Jinja's sandbox.

    Args:
        directory: the target's; its chat_template.jinja, else `chat_template` of tokenizer_config.json, is rendered.
        messages: {"role": ..., "content": ...} each.

    Raises:
        ImportError: the jinja2 package is missing.
        FileNotFoundError, ValueError: no template, one that is malformed, or one that refuses the messages.
    """
    jinja2 = require("jinja2", "cli", "a chat template")
    sandbox = require("jinja2.sandbox", "cli", "a chat template")
    path = os.path.join(directory, "tokenizer_config.json")
    config = read_json(path, large_integers=True) if os.path.lexists(path) else {}
    template = _find_template(directory, config)

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_generation_tag(jinja2), "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    try:
        return environment.from_string(template).render(
            messages=messages, tools=None, documents=None, add_generation_prompt=True, **_special_tokens(config)
        )
    except (jinja2.TemplateError, TypeError) as error:
        raise ValueError(f"{directory}: chat template: {error}") from None


def _find_template(directory: str, config: dict[str, Any]) -> str:
    path = os.path.join(directory, "chat_template.jinja")
    if os.path.lexists(path):
        try:
            return read_bytes(path, MAX_TEMPLATE).decode("utf-8")
        except UnicodeDecodeError:
            raise ValueError(f"{path}: not UTF-8") from None
    found = config.get("chat_template")
    if isinstance(found, list):  # several, by name
        named = {e["name"]: e.get("template") for e in found if isinstance(e, dict) and isinstance(e.get("name"), str)}
        found = named.get("default")
    if not isinstance(found, str):
        where = "chat_template.jinja or chat_template in tokenizer_config.json"
        raise ValueError(f"{directory}: found no chat template, expected {where}")
    return found


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Return the special tokens that the config names, as texts (older files wrap them in objects)."""
    tokens = {name: config.get(name) for name in SPECIAL}
    texts = {name: token.get("content") if isinstance(token, dict) else token for name, token in tokens.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    # Jinja's own filter escapes HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _generation_tag(jinja2: Any) -> Any:
    """Return the extension for {% generation %} ... {% endgeneration %}, which marks answers and changes no text."""
    extension = require("jinja2.ext", "cli", "a chat template").Extension

    class GenerationTag(extension):  # pyright: ignore[reportGeneralTypeIssues]
        tags = frozenset({"generation"})

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.Scope(body, lineno=line)

    return GenerationTag
