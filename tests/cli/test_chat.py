"""Chat templates against transformers' own rendering."""

import json

import pytest
from helpers import CHECKPOINTS

from dspark_jax.cli import main
from dspark_jax.cli.chat import render_chat

pytest.importorskip("jinja2", reason="renders templates")

TEMPLATES = {
    # Whitespace control, a default system message, special tokens.
    "chatml": "{% for m in messages %}\n  {% if loop.first and m['role'] != 'system' %}\n{{ bos_token }}<|im_start|>"
    "system\nHelp.<|im_end|>\n    {% endif %}\n"
    "{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
    "control flow": "{%- for m in messages -%}{%- if m.role == 'system' -%}{%- continue -%}{%- endif -%}"
    "{{ m | tojson }}{% generation %} {{ m.content | trim }} {% endgeneration %}{%- if tools is none %}!{% endif -%}"
    "{%- endfor -%}{{ eos_token }}{{ unknown_name }}",
}
MESSAGES = [{"role": "system", "content": "Sum <up>."}, {"role": "user", "content": " 2 & ü? \n"}]
CONFIG = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": {"content": "</s>"}}


def write(directory, template, **fields):
    (directory / "tokenizer_config.json").write_text(json.dumps({**CONFIG, "chat_template": template, **fields}))
    return str(directory)


@pytest.mark.parametrize("messages", [MESSAGES, MESSAGES[1:]], ids=["system", "user"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_text_equals_transformers(name, messages, tmp_path):
    chat = pytest.importorskip("transformers.utils.chat_template_utils", reason="compares with transformers")
    wanted, _ = chat.render_jinja_template(
        [messages], chat_template=TEMPLATES[name], add_generation_prompt=True, bos_token="<s>", eos_token="</s>"
    )
    assert render_chat(write(tmp_path, TEMPLATES[name]), messages) == wanted[0]


def test_sources_of_the_template(tmp_path):
    named = [{"name": "tool_use", "template": "wrong"}, {"name": "default", "template": "{{ messages[0].content }}!"}]
    assert render_chat(write(tmp_path, named), MESSAGES) == "Sum <up>.!"
    (tmp_path / "chat_template.jinja").write_text("file {{ bos_token }}")
    assert render_chat(str(tmp_path), MESSAGES) == "file <s>"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "found no chat template"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% for %}", "chat template: "),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
    ],
)
def test_templates_that_fail_are_one_error(template, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        render_chat(write(tmp_path, template), MESSAGES)


def test_command_refuses_a_target_without_template(capsys):
    command = ["generate", str(CHECKPOINTS / "dspark-vanilla"), "--target", str(CHECKPOINTS / "target"), "--chat"]
    assert main([*command, "--prompt", "x"]) == 2
    assert "found no chat template" in capsys.readouterr().err
