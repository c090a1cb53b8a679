"""What pages name is there: settings, their values, metrics, modules, files, headings. Built-in names are described."""

from __future__ import annotations

import ast
import importlib
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from scripts.generate_config_docs import RECIPES
from tests.sanity.source_tree import ROOT, read_toml, tracked_files
from verl import registry
from verl.config.loading.configuration import read_config
from verl.config.loading.groups import NAMES, PPO
from verl.config.loading.recipes import with_recipes
from verl.config.schema.node import schema_of

GENERATED = ("docs/reference/configuration.md", "docs/reference/configuration_more.md", "docs/appendix/coverage.md")
PAGES = sorted(
    page
    for page in tracked_files()
    if page.suffix in (".md", ".rst") and "tests" not in page.parts and str(page.relative_to(ROOT)) not in GENERATED
)
IDS = [str(page.relative_to(ROOT)) for page in PAGES]
every_page = pytest.mark.parametrize("page", PAGES, ids=IDS)
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
PROGRAMS = {"main_generation": "generation", "main_eval": "evaluation"}
NO_SETTINGS = (
    "actor_rollout_ref.actor.tis_imp_ratio_cap",
    "kernel.apparmor_restrict_unprivileged_userns",
    "algorithm.bonus",
)
"""One that a page says is gone, one of Linux, one that an example brings (tests/recipe/test_own_code.py)."""


def code(page: Path) -> list[str]:
    """What stands between backticks in the running text."""
    return re.findall(r"`([^`\n]+)`", FENCE.sub("", page.read_text(encoding="utf-8")))


def blocks(page: Path, *languages: str) -> list[str]:
    return [body for language, body in FENCE.findall(page.read_text(encoding="utf-8")) if language in languages]


def is_there(name: str) -> bool:
    """Whether ``a.b.c`` or ``a.b:c`` can be imported."""
    parts = re.split(r"[.:]", name)
    for cut in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False


@every_page
def test_names_of_the_library_can_be_imported(page):
    text = page.read_text(encoding="utf-8")
    names = set(re.findall(r"(?<![\w./-])((?:verl|recipe)(?:\.[A-Za-z_]\w*)+(?::\w+)?)", text))
    assert [name for name in sorted(names) if not is_there(name)] == []


@every_page
def test_python_blocks_are_python_and_import_what_is_there(page):
    missing = []
    for block in blocks(page, "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in ("verl", "recipe"):
                missing += [
                    f"{node.module}.{name.name}" for name in node.names if not is_there(f"{node.module}.{name.name}")
                ]
    assert missing == []


@every_page
def test_files_of_the_checkout_are_there(page):
    rooms = "verl|tests|benchmarks|scripts|recipe|docker|docs"
    named = [
        path.rstrip(".") for text in code(page) for path in re.findall(rf"(?<![\w./-])((?:{rooms})/[\w./-]+)", text)
    ]
    named += [f"tests/{path}" for text in code(page) for path in re.findall(r"^(\w+/test_\w+\.py)$", text)]
    assert [path for path in named if not (ROOT / path).exists() and not (page.parent / path).exists()] == []


def headings(page: Path) -> set[str]:
    """The anchors of a page, as GitHub makes them."""
    found = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    words = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").lower() for heading in found)
    return {re.sub(r"[^\w\- ]", "", word).replace(" ", "-") for word in words}


@every_page
def test_links_into_a_page_lead_to_a_heading(page):
    links = re.findall(r"\]\(([^)#\s:]*\.md)?#([^)]+)\)", FENCE.sub("", page.read_text(encoding="utf-8")))
    assert [link for link in links if link[1] not in headings(page.parent / link[0] if link[0] else page)] == []


TREES = [*(program for program, _ in NAMES.values()), with_recipes(PPO, RECIPES)]


def endings() -> set[str]:
    """Every setting and section of every program under its full key and all shorter ones: ``rollout.n``, ``n``."""
    found = set()
    for program in TREES:
        schema = schema_of(program.root)
        for key in (*schema.leaves, *schema.sections):
            parts = key.split(".")
            found |= {".".join(parts[start:]) for start in range(len(parts))}
    return found


ENDINGS = endings()


def is_setting(key: str) -> bool:
    """A setting, in full or shortened; a key inside one that holds a mapping; or an older spelling."""
    for program in TREES:
        schema, old = schema_of(program.root), program.aliases.moved
        full = (key, f"actor_rollout_ref.{key}", f"actor_rollout_ref.model.{key}")
        if any(schema.split(name) for name in full) or any(f"{key}.".startswith(f"{name}.") for name in old):
            return True
    return key in ENDINGS


@every_page
def test_settings_that_the_text_names_exist(page):
    named = []
    for text in code(page):
        if "(" not in text:
            named += re.findall(r"(?<![\w./-])\+{0,2}([a-z_]\w*(?:\.\w+)+)=", text)
        if re.fullmatch(r"(actor_rollout_ref|critic|data|trainer|algorithm|reward|global_profiler)(\.\w+)+", text):
            named.append(text)
    named = [key for key in named if key not in NO_SETTINGS and not key.endswith((".py", ".json"))]
    assert [key for key in named if not is_setting(key)] == []


def defaults(key: str) -> list[Any]:
    """What a setting, in full or shortened, is by default, wherever it is."""
    schemas = [schema_of(program.root) for program in TREES]
    return [
        leaf.default for schema in schemas for name, leaf in schema.leaves.items() if f".{name}".endswith(f".{key}")
    ]


@every_page
def test_defaults_that_stand_in_the_text_are_the_settings_own(page):
    """``key`` (number), and tables whose first two columns are settings below a section and their defaults."""
    text, wrong = page.read_text(encoding="utf-8"), []
    for key, said in re.findall(r"`([a-z_][\w.]*)` \(([-\d.,e]+)(?: \w+)?\)", text):
        if defaults(key) and float(said.replace(",", "")) not in defaults(key):
            wrong.append((key, said))
    for section, rows in re.findall(r"^\| `([\w.]+)\.` \| default \|.*\n\|[ |-]+\n((?:\|.*\n)+)", text, re.MULTILINE):
        for name, said in re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", rows, re.MULTILINE):
            value = json.loads(said) if re.match(r"null|true|false|[-\d.]", said) else said
            if value not in defaults(f"{section}.{name}"):
                wrong.append((name, said))
    assert wrong == []


@every_page
def test_commands_are_made_of_settings_and_of_values_that_these_take(page):
    for command in "\n".join(blocks(page, "bash", "sh")).replace("\\\n", " ").splitlines():
        module = re.search(r"-m (verl\.trainer|recipe\.\w+)\.(\w+)", command)
        if module is None or module[2] == "main_generation_server":  # has settings of its own, behind a plus
            continue
        words = shlex.split(command, comments=True)
        given = [word for word in words[words.index("-m") + 2 :] if re.match(r"[+~]{0,2}[a-z_][\w.]*=", word)]
        name = PROGRAMS.get(module[2], module[2] if module[2] in NAMES else "ppo_trainer")
        read_config(name, [word for word in given if not word.endswith("...")])


PLACES = {
    **{"sft": "sft_trainer", "dpo": "dpo_trainer", "rm": "rm_trainer"},
    **{"generate": "generation", "eval": "evaluation"},
}
"""The configuration of a command of `verl`; of `train` it is that of PPO."""


@every_page
def test_commands_of_verl_and_blocks_of_settings_are_made_of_what_there_is(page):
    for command in "\n".join(blocks(page, "bash", "sh")).replace("\\\n", " ").splitlines():
        if started := re.search(r"(?:^| )verl (train|sft|dpo|rm|generate|eval) ", f"{command} "):
            words = shlex.split(command, comments=True)
            given = [word for word in words[words.index("verl") :] if re.match(r"[+~]{0,2}[a-z_][\w.]*=", word)]
            read_config(PLACES.get(started[1], "ppo_trainer"), [word for word in given if "$" not in word])
    for block in blocks(page, "ini"):
        lines = [line for line in block.splitlines() if line and not line.startswith("#")]
        known = [name for name in ("ppo_trainer", *PLACES.values()) if all(is_of(name, line) for line in lines)]
        assert known, f"no program has all of {lines}"
        read_config(known[0], lines)


def is_of(name: str, line: str) -> bool:
    """Whether a program has the setting, or the choice of a group, of a line."""
    return "." not in line.partition("=")[0] or bool(
        schema_of(NAMES[name][0].root).split(line.partition("=")[0].lstrip("+"))
    )


def strings() -> str:
    """Every text and name in the code from which the key of a metric may be made."""
    found = set()
    for file in tracked_files():
        if file.suffix != ".py" or file.relative_to(ROOT).parts[0] not in ("verl", "recipe"):
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and "\n" not in node.value:
                found.add(node.value)
            elif isinstance(node, ast.FunctionDef | ast.arg | ast.keyword):
                found.add((node.name if isinstance(node, ast.FunctionDef) else node.arg) or "")
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found.add(node.target.id)
    return "\n".join(found)


METRIC = re.compile(
    r"(?:actor|critic|training|perf|timing_s|rollout_corr|reward|reward_model|tool_calls|tool_call_counts|agent_loop|"
    r"rollout|val|train|response_length|prompt_length|num_turns|moe)/[\w/*{},<>@]+"
)


@pytest.fixture(scope="module")
def texts() -> str:
    return strings()


@every_page
def test_metrics_are_made_somewhere_in_the_code(page, texts):
    """The words of a metric's key stand in the code; a key may be put together, so each word for itself."""
    missing = []
    for text in code(page):
        if METRIC.fullmatch(text) is None or (ROOT / "verl" / text).exists() or text.endswith("/"):
            continue
        words = [re.sub(r"[*@].*", "", word).rstrip("_") for word in re.split(r"[/{},]|<[^>]*>", text)]
        missing += [text for word in words if word and not re.search(rf"(?<![a-z]){re.escape(word)}", texts)]
    assert missing == []


DESCRIBED = {
    "docs/concepts/algorithms.md": (registry.ADVANTAGE_ESTIMATORS, registry.POLICY_LOSSES),
    "docs/concepts/backends.md": (registry.ENGINES,),
    "docs/howto/engines.md": (registry.SAMPLERS,),
    "docs/howto/multi_turn.md": (registry.TOOL_PARSERS,),
    "docs/howto/rewards.md": (registry.REWARD_MANAGERS,),
    "docs/howto/tracking.md": (registry.TRACKERS,),
    "docs/concepts/weight_sync.md": (registry.TRANSPORTS,),
}


@pytest.mark.parametrize("page", DESCRIBED)
def test_every_built_in_name_is_described(page):
    said = code(ROOT / page)
    names = [name for kind in DESCRIBED[page] for name in kind.builtin_targets()]
    assert [name for name in names if name not in said] == []


def test_every_program_that_prepares_data_is_described():
    said = " ".join(code(ROOT / "docs/appendix/prepared_data.md"))
    programs = [
        file.stem for file in (ROOT / "examples/data_preprocess").glob("*.py") if "def main(" in file.read_text()
    ]
    assert programs and [name for name in programs if not re.search(rf"\b{name}\b", said)] == []


def test_the_table_of_layers_is_that_of_the_file():
    layers = read_toml(ROOT / "layers.toml")["layers"]
    page = (ROOT / "docs/concepts/design.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| (`[^|]*) \|", page, re.MULTILINE)
    assert {number: re.findall(r"`(\w+)`", rooms) for number, rooms in rows} == {
        number: listed
        for number, rooms in layers.items()
        if (listed := [r for r in rooms if not re.match("_|.*__main__", r)])
    }
    paths = {room: room.replace(".", "/") for rooms in layers.values() for room in rooms}
    missing = [room for room, path in paths.items() if not list((ROOT / "verl").glob(f"{path}*"))]
    assert missing == [], "a room of layers.toml that is not there"


def test_pages_that_messages_of_the_library_name_are_there_and_say_it():
    texts = [file.read_text() for file in (ROOT / "verl").rglob("*.py")]
    named = {page for text in texts for page in re.findall(r"docs/\w+/\w+\.md", text)}
    assert named and [page for page in sorted(named) if not (ROOT / page).is_file()] == []
    told = "It gets reward_router_address; docs/howto/rewards.md has one."
    assert told in (ROOT / "verl/config/rules/reward_model.py").read_text(encoding="utf-8")
    assert any("reward_router_address=None" in block for block in blocks(ROOT / "docs/howto/rewards.md", "python"))
