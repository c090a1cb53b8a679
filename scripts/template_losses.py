"""Write docs/appendix/templates.md: what chat templates write of a conversation, tried with marks.

    PYTHONPATH=. VERL_SHARED=FOLDER python scripts/template_losses.py [--check] [--model FOLDER ...]

The table has the templates of the tests: those stored in ``VERL_SHARED`` and the structures of published families. With
``--model`` it is printed for the tokenizers of these folders or hub names instead.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.harness.families import FAMILIES, family_tokenizer
from tests.harness.template_structures import STRUCTURES, structure_tokenizer
from verl import env
from verl.data.chat_template import ChatTemplate
from verl.data.tokenizer import hf_tokenizer
from verl.data.turns import TurnFinder
from verl.data.written import UNKNOWN
from verl.errors import DataError, ModelError
from verl.metrics import notices, reset_notices

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "appendix" / "templates.md"
HEAD = """# What chat templates leave out

This page is made by `scripts/template_losses.py`, and a test holds it to what the library finds. `--model FOLDER`
prints the table for your tokenizer.

A template may not know a field, skip a role, or cut off thoughts. The library puts a mark into every part of a
conversation, once for conversations of one shape, and looks for it in the rendering (`verl.data.written`). What a model
would be trained on and the template does not write is refused; anything else is named in a notice, with the way out.

| | meaning |
| --- | --- |
| yes | written |
| no | not written: a notice; refused where it would be trained |
| last | only written in the last turn: earlier turns lose it |
| refused | the template refuses such a conversation |
| parts, text, object | the form that the template writes, which the library gives to it |

"""
USER, MORE, END = ({"role": "user", "content": said} for said in ("What is it?", "And that?", "Thanks."))
CALL = {"id": "call00000", "type": "function", "function": {"name": "look", "arguments": {"at": "it"}}}
CALLS = {"role": "assistant", "content": "", "tool_calls": [CALL]}
REPLY = {"role": "tool", "content": "a cat", "name": "look", "tool_call_id": "call00000"}
ANSWER = {"role": "assistant", "content": "A cat."}
THOUGHT = {**ANSWER, "reasoning_content": "It has whiskers."}
SAID = {**ANSWER, "content": "<think>\nIt has whiskers.\n</think>\n\nA cat."}
PROPERTIES = {"at": {"type": "string", "description": "where"}}
LOOK = {"name": "look", "description": "Looks.", "parameters": {"type": "object", "properties": PROPERTIES}}
TRIED: dict[str, tuple[list[dict[str, Any]], str, str]] = {
    "system": ([{"role": "system", "content": "Be brief."}, USER, ANSWER], "content", "system"),
    "tool calls": ([USER, CALLS], "tool_calls", ""),
    "two calls": ([USER, {**CALLS, "tool_calls": [CALL, {**CALL, "id": "call00001"}]}], "tool_calls", ""),
    "text with calls": ([USER, {**CALLS, "content": "Let me look."}], "content", "assistant"),
    "tool answers": ([USER, CALLS, REPLY, ANSWER], "content", "tool"),
    "tools": ([USER, ANSWER], "tools", ""),
    "reasoning_content": ([USER, THOUGHT, MORE, THOUGHT], "reasoning_content", ""),
    "thinking": ([USER, THOUGHT | {"thinking": "It has whiskers.", "reasoning_content": None}], "thinking", ""),
    "thoughts in text": ([USER, SAID, MORE, SAID], "content", "assistant"),
}


def tried(template: ChatTemplate, name: str) -> str:
    """What the template does with one field."""
    messages, field, role = TRIED[name]
    messages = [{key: value for key, value in message.items() if value is not None} for message in messages]
    arguments = {"tools": [{"type": "function", "function": LOOK}]} if field == "tools" else {}
    reset_notices()
    try:
        template.render(messages, **arguments)
    except DataError:
        return "refused"
    lost = template.lost(messages, **arguments)
    if any(part.field == UNKNOWN for part in lost):
        return UNKNOWN
    lost = tuple(part for part in lost if part.field == field and role in ("", part.role))
    if field == "tools" and lost:
        return "no" if not lost[0].detail else "without " + ", ".join(part.detail for part in lost)
    return "no" if not all(part.earlier for part in lost) else "last" if lost else "yes"


def forms(template: ChatTemplate) -> tuple[str, str]:
    """The form of contents and of arguments that the template writes."""
    forms_of = template.forms()
    taken = [name for name, there in (("text", forms_of.text_calls), ("object", forms_of.object_calls)) if there]
    return "parts" if forms_of.parts else "text", " or ".join(taken) or "none"


def end(tokenizer: Any) -> str:
    """How the template ends a turn, and whether an answer begins with the generation prompt."""
    reset_notices()
    turns = TurnFinder(ChatTemplate(tokenizer), keep_produced=True)
    try:
        ids, mask = turns.encode([USER, ANSWER, MORE, ANSWER])
    except (DataError, ModelError) as error:
        return f"refused: {error.message.split(':')[0]}"
    pieces = [tokenizer.decode([i]) for i, (now, after) in zip(ids, zip(mask, [*mask[1:], 0])) if now and not after]
    behind = ", behind another prompt" * any("generation prompt" in name for name in notices())
    return " and ".join(f"`{piece}`" for piece in dict.fromkeys(pieces)) + behind


def tokenizers(models: list[str]) -> Iterator[tuple[str, Any]]:
    """The tokenizers of the table by name."""
    for name in models:
        yield name, hf_tokenizer(name)
    if not models:
        shared = Path(env.get("VERL_SHARED") or ROOT.parent / "shared")
        for name in sorted(FAMILIES):
            yield f"{name} (stored)", family_tokenizer(shared, name)
        for name, template in STRUCTURES.items():
            yield name, structure_tokenizer(template)


def table(models: list[str] | None = None) -> str:
    """The table as Markdown."""
    rows = [["template", *TRIED, "contents", "arguments", "an answer's last token"]]
    rows.append(["---"] * len(rows[0]))
    for name, tokenizer in tokenizers(models or []):
        template = ChatTemplate(tokenizer)
        rows.append([name, *(tried(template, one) for one in TRIED), *forms(template), end(tokenizer)])
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |\n" for row in rows)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only say whether the page is current")
    parser.add_argument("--model", nargs="+", default=[], help="print the table of these tokenizers")
    given = parser.parse_args(arguments)
    if given.model:
        print(table(given.model))
        return 0
    page = HEAD + table()
    if given.check:
        return int(PAGE.read_text(encoding="utf-8") != page)
    PAGE.write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
