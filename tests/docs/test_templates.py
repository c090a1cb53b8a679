"""docs/appendix/templates.md is what the library finds, and every row is as its template is written."""

from __future__ import annotations

import pytest

from scripts import template_losses
from tests.harness.families import FAMILIES
from tests.harness.template_structures import STRUCTURES, structure_tokenizer
from verl.data.chat_template import ChatTemplate
from verl.metrics import notices

# Read off the templates: what each loses of the conversations that are tried.
LOST = {
    "chatml": {"tool calls", "two calls", "tools", "reasoning_content", "thinking"},
    "command-r": {"tool calls", "two calls", "tool answers", "tools", "reasoning_content", "thinking"},
    "deepseek-v3": {"tools", "reasoning_content", "thinking", "thoughts in text"},
    "gpt-oss": {"two calls", "text with calls"},
    "hermes-3": {"tools", "reasoning_content", "thinking"},
    "mistral-v3": {"system", "text with calls", "reasoning_content", "thinking"},
    "qwen3-2507": {"reasoning_content", "thinking"},
}


@pytest.mark.parametrize("name", LOST)
def test_what_a_template_loses_is_found(name):
    template = ChatTemplate(structure_tokenizer(STRUCTURES[name]))
    assert {one for one in template_losses.TRIED if template_losses.tried(template, one) == "no"} == LOST[name]


def test_the_page_of_templates_is_what_the_script_finds(shared):
    made = template_losses.HEAD + template_losses.table()
    assert template_losses.PAGE.read_text(encoding="utf-8") == made, "run scripts/template_losses.py"
    assert made.count("\n| ") >= len(FAMILIES) + len(STRUCTURES) and len(STRUCTURES) >= 20 and "unknown" not in made


def test_nothing_that_the_page_says_is_lost_in_silence():
    for name, template in STRUCTURES.items():
        tokenizer = structure_tokenizer(template)
        for one, (messages, _, _) in template_losses.TRIED.items():
            if template_losses.tried(ChatTemplate(tokenizer), one) in ("no", "last"):
                tools = {"tools": [{"type": "function", "function": template_losses.LOOK}]} if one == "tools" else {}
                ChatTemplate(tokenizer).check_written(messages, **tools)
                assert any(key.startswith("the chat template and ") for key in notices()), (name, one)


def test_the_table_of_a_model_folder_is_printed(qwen2, capsys):
    assert template_losses.main(["--model", str(qwen2)]) == 0
    assert "| yes | no | no | yes |" in capsys.readouterr().out
