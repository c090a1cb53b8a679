"""How each family's template writes the calls of an assistant turn, as small Jinja templates.

Qwen's own templates are in ``shared/data/chat_templates`` and are taken from there; of the other families the part that
writes calls is written down here, from the formats that their makers document.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2.sandbox import ImmutableSandboxedEnvironment

from tests.harness.families import family_template

XML_VALUE = "{{ v if v is string else v | tojson }}"
TEMPLATES = {
    "llama3_json": '{% for c in calls %}{{ "; " if not loop.first }}'
    '{"name": "{{ c.name }}", "parameters": {{ c.arguments | tojson }}}{% endfor %}',
    "kimi": "<|tool_calls_section_begin|>{% for c in calls %}"
    "<|tool_call_begin|>functions.{{ c.name }}:{{ loop.index0 }}"
    "<|tool_call_argument_begin|>{{ c.arguments | tojson }}<|tool_call_end|>{% endfor %}<|tool_calls_section_end|>",
    "deepseek_v3": "<｜tool▁calls▁begin｜>{% for c in calls %}<｜tool▁call▁begin｜>{{ c.name }}<｜tool▁sep｜>"
    "{{ c.arguments | tojson }}<｜tool▁call▁end｜>{% endfor %}<｜tool▁calls▁end｜>",
    "gpt-oss": "<|channel|>analysis<|message|>Let me see.<|end|>{% for c in calls %}<|start|>assistant"
    "{% if loop.index0 % 2 %} to=functions.{{ c.name }}<|channel|>commentary json{% else %}"
    "<|channel|>commentary to=functions.{{ c.name }} <|constrain|>json{% endif %}"
    "<|message|>{{ c.arguments | tojson }}<|call|>{% endfor %}",
    "qwen3_coder": "{% for c in calls %}<tool_call>\n<function={{ c.name }}>\n{% for k, v in c.arguments.items() %}"
    "<parameter={{ k }}>\n" + XML_VALUE + "\n</parameter>\n{% endfor %}</function>\n</tool_call>\n{% endfor %}",
    "seed": "{% for c in calls %}<seed:tool_call>\n<function={{ c.name }}>\n{% for k, v in c.arguments.items() %}"
    "<parameter={{ k }}>" + XML_VALUE + "</parameter>\n{% endfor %}</function>\n</seed:tool_call>\n{% endfor %}",
    "minimax": '<minimax:tool_call>\n{% for c in calls %}<invoke name="{{ c.name }}">\n'
    '{% for k, v in c.arguments.items() %}<parameter name="{{ k }}">' + XML_VALUE + "</parameter>\n{% endfor %}"
    "</invoke>\n{% endfor %}</minimax:tool_call>",
    "deepseek_v4": '<｜DSML｜tool_calls>\n{% for c in calls %}<｜DSML｜invoke name="{{ c.name }}">\n'
    '{% for k, v in c.arguments.items() %}<｜DSML｜parameter name="{{ k }}" '
    'string="{{ "true" if v is string else "false" }}">' + XML_VALUE +
    "</｜DSML｜parameter>\n{% endfor %}</｜DSML｜invoke>\n{% endfor %}</｜DSML｜tool_calls>",
    "glm": "{% for c in calls %}<tool_call>{{ c.name }}\n"
    "{% for k, v in c.arguments.items() %}<arg_key>{{ k }}</arg_key>\n"
    "<arg_value>" + XML_VALUE + "</arg_value>\n{% endfor %}</tool_call>\n{% endfor %}",
    "gemma4": "{% macro w(v) %}{% if v is string %}<|\"|>{{ v }}<|\"|>"
    "{% elif v is mapping %}{ {%- for k, x in v.items() %}"
    "{{ ',' if not loop.first }}{{ k }}:{{ w(x) }}{% endfor %}}{% elif v is iterable %}[{% for x in v %}"
    "{{ ',' if not loop.first }}{{ w(x) }}{% endfor %}]{% else %}{{ v | tojson }}{% endif %}{% endmacro %}"
    "{% for c in calls %}<|tool_call>call:{{ c.name }}{{ w(c.arguments) }}<tool_call|>{% endfor %}",
}  # fmt: skip


def write_calls(shared: Path, family: str, calls: list[dict[str, Any]]) -> str:
    """The text of an assistant turn that makes these calls ({name, arguments}), without its header and end."""
    if family in ("qwen2.5", "qwen3"):
        return _own_template(shared, family, calls)
    return environment().from_string(TEMPLATES[family]).render(calls=calls)


def _own_template(shared: Path, family: str, calls: list[dict[str, Any]]) -> str:
    tool_calls = [{"type": "function", "function": call} for call in calls]
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": tool_calls}]
    text = environment().from_string(family_template(shared, family)).render(messages=messages)
    return text[text.rindex("<|im_start|>assistant\n") + len("<|im_start|>assistant\n") :].removesuffix("<|im_end|>\n")


def environment() -> ImmutableSandboxedEnvironment:
    """Jinja as transformers sets it up: blocks are trimmed, JSON is not escaped for HTML."""
    import json

    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    made.filters["tojson"] = lambda value, **_: json.dumps(value, ensure_ascii=False)
    return made
