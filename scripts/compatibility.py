"""How many of upstream's own commands resolve here, and what stands in the way of the others.

    PYTHONPATH=. python scripts/compatibility.py COMMANDS.jsonl [--list] [--write]
    PYTHONPATH=. python scripts/compatibility.py --record UPSTREAM_FOLDER > COMMANDS.jsonl

A line of COMMANDS.jsonl is a script: ``{"script": name, "commands": [{"program": module, "argv": [...]}, ...]}``. Each
command goes through the ``main(argv)`` of its program on a machine that has every package, device and file, until its
configuration is resolved; no work starts. Settings that are refused one by one are then left out, so that all reasons
of a script are known, and not the first alone. ``--write`` puts the result into docs/appendix/compatibility.md.

``--record`` runs the shell scripts of a checkout with stand-ins for every program, see `scripts.recording`.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import importlib.util
import io
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any
from unittest import mock

from scripts import recording
from tests.brief.machine import guides_machine
from verl import device
from verl.errors import ConfigError, NotBuiltError, VerlError
from verl.json_text import read_json
from verl.metrics import reset_notices

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "appendix" / "compatibility.md"
KINDS = ("not built", "unknown key", "module missing", "not recorded", "a relation or a value")
Main = Callable[[list[str]], int]
DEVICES, ROUNDS = 4096, 8
_IMAGES = re.compile(
    r"image_key=|video_key=|model\.path=.*[-_]vl[-_]|(train|val)_files=.*(geo3k|video|vlm|pokemon)", re.I
)
_BY_UV = re.compile(r"runtime_env\.py_executable=\W*uv\b")
_ENGINES = ("veomni", "torchtitan", "automodel", "mindspeed", "fsdp_turbo", "mlite", "megatron")


@dataclass(frozen=True)
class Reason:
    """What stands in the way: one of `KINDS`, and its name: a feature, a key, a module, or a sentence."""

    kind: str
    name: str


@dataclass
class Verdict:
    """What became of a script: no reasons if all of its commands resolve."""

    script: str
    engine: str
    category: str
    by_uv: bool = False
    """Whether it starts Ray's workers by uv (``runtime_env.py_executable``)."""
    reasons: dict[Reason, str] = field(default_factory=dict)


class _Resolved(BaseException):
    """Ends a program where its work would start."""


def read_commands(file: Path) -> list[dict[str, Any]]:
    """The scripts of a recording."""
    return [read_json(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]


def verdicts(scripts: list[dict[str, Any]], every_reason: bool = True) -> list[Verdict]:
    """What becomes of every script, in one process.

    Args:
        every_reason: go on where a reason may hide others; else the first ones count.
    """
    programs = {command["program"] for script in scripts for command in script["commands"]}
    # imported while no package seems to be there that is not
    mains = {name: _main_of(name) for name in programs}
    importlib.import_module("verl.models.attention.interface")
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stack.enter_context(_machine(folder))
        return [_of_script(script, folder, mains, ROUNDS if every_reason else 1) for script in scripts]


@contextlib.contextmanager
def _machine(folder: Path) -> Iterator[None]:
    """Every device, package and file is there, and a program stops where its configuration is resolved."""
    from verl.config.loading import configuration, files
    from verl.config.machine import host, profiling
    from verl.config.rules import distillation, reward_model
    from verl.trainer import export, main_generation_server

    check_whole = configuration._check_whole

    def checked(*arguments: Any) -> None:
        check_whole(*arguments)
        raise _Resolved

    def resolved(*arguments: Any, **named: Any) -> None:
        raise _Resolved

    there = (
        (device, "device_count", lambda kind: DEVICES),
        (host, "files", lambda cfg: []),
        (host, "sft_files", lambda cfg: []),
        (profiling, "lacking", lambda cfg: []),
        (reward_model, "bad_model_folder", lambda *arguments: []),
        (distillation, "bad_model_folder", lambda *arguments: []),
        (main_generation_server, "missing_folder", lambda key, path: []),
        (configuration, "_check_whole", checked),
        (export, "_run", resolved),
        (files, "parse_override", functools.cache(files.parse_override)),
    )
    with contextlib.ExitStack() as stack:
        stack.enter_context(guides_machine(folder / "guides"))
        stack.enter_context(mock.patch.dict(os.environ, {"HOME": str(folder)}))
        for module, name, value in there:
            stack.enter_context(mock.patch.object(module, name, value))
        yield


def _of_script(script: dict[str, Any], folder: Path, mains: Mapping[str, Main | None], rounds: int) -> Verdict:
    text = " ".join(word for command in script["commands"] for word in [command["program"], *command["argv"]])
    recipe = script["script"].startswith("recipe/")
    images = bool(_IMAGES.search(text))
    category = f"{'recipes' if recipe else 'examples and tests'}{', with images' if images else ''}"
    verdict = Verdict(script["script"], _engine(text, script["script"]), category, bool(_BY_UV.search(text)))
    for command in script["commands"]:
        os.environ["WORLD_SIZE"] = "1" if "ppo" in command["program"] else _started(command["argv"])
        argv = [word.replace("@HOME", str(folder)).replace("@UPSTREAM", str(folder)) for word in command["argv"]]
        for reason, example in _reasons(command["program"], mains[command["program"]], argv, rounds).items():
            verdict.reasons.setdefault(reason, example)
    return verdict


def _started(argv: list[str]) -> str:
    """How many processes torchrun started: as many as the command names, or those of one machine."""
    given = dict(word.lstrip("+").split("=", 1) for word in argv if "=" in word)
    sizes = [given.get(f"trainer.{name}", usual) for name, usual in (("nnodes", "1"), ("n_gpus_per_node", "8"))]
    return str(int(sizes[0]) * int(sizes[1])) if all(size.isdigit() for size in sizes) else "8"


def _engine(text: str, name: str) -> str:
    if "strategy=fsdp_turbo" in text or "fsdp_turbo" in name:
        return "fsdp_turbo"
    chosen = re.findall(r"(?:model_engine|engine|strategy)=(\w+)|config-name=\S*?(megatron)", text)
    words = " ".join(one or two for one, two in chosen)
    return next((engine for engine in _ENGINES if engine in words), "fsdp")


def _reasons(program: str, main: Main | None, argv: list[str], rounds: int) -> dict[Reason, str]:
    """All reasons of a command with their messages: what is refused by itself is left out, and the rest tried again."""
    reasons: dict[Reason, str] = {}
    for _ in range(rounds):
        problems = _attempt(main, argv) if main else [(Reason("module missing", program), program, "")]
        for reason, message, _ in problems:
            reasons.setdefault(reason, message)
        left = [word for word in argv if not any(_is_about(word, key) for _, _, key in problems if key)]
        if not problems or len(left) == len(argv) or not all(key for _, _, key in problems):
            break
        argv = left
    return reasons


def _is_about(word: str, key: str) -> bool:
    own = word.lstrip("+~").partition("=")[0]
    if key.endswith(".strategy") and re.match(r"model_engine=|engine=|\w+@", word):
        return True
    return own == key or own.startswith(f"{key}.") or key.startswith(f"{own}.")


def _attempt(main: Main, argv: list[str]) -> list[tuple[Reason, str, str]]:
    """The problems of one command (none: it resolves): reason, message, and a setting to leave out."""
    from verl.config.loading import resolve
    from verl.config.rules import checks

    problems: list[VerlError] = []
    raise_all = resolve.raise_all

    def kept(found: list[ConfigError]) -> None:
        problems.extend(found)
        raise_all(found)

    reset_notices()
    errors, status = io.StringIO(), 0
    with contextlib.ExitStack() as stack:
        for module in (checks, resolve):
            stack.enter_context(mock.patch.object(module, "raise_all", kept))
        stack.enter_context(contextlib.redirect_stderr(errors))
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        try:
            status = main(argv)
        except _Resolved:
            return []
        except SystemExit as left:
            status = left.code
    if problems:
        return [_classified(problem) for problem in problems]
    if not status:
        return []
    message = errors.getvalue().strip() or f"exit status {status}"
    return [(_of_text(message), message, "")]


def _main_of(program: str) -> Main | None:
    """The ``main`` of a module or of a package's ``__main__``; None where there is no such module."""
    try:
        there = importlib.util.find_spec(program) is not None
    except ModuleNotFoundError:
        return None
    if not there:
        return None
    module = importlib.import_module(program)
    return module.main if hasattr(module, "main") else importlib.import_module(f"{program}.__main__").main


def _classified(problem: VerlError) -> tuple[Reason, str, str]:
    key, message = str(problem.key or ""), str(problem)
    plain = re.sub(r" \(in [^)]*\)|, given as \S+", "", problem.message)
    if isinstance(problem, NotBuiltError):
        feature = plain.partition(": ")[2] or plain
        return Reason("not built", feature), message, key
    if plain.startswith("unknown setting"):
        return Reason("unknown key", key), message, key
    return Reason("a relation or a value", f"{key}: {re.sub(r'[0-9]+', 'N', plain)}"), message, ""


def _of_text(message: str) -> Reason:
    first = next((line for line in message.splitlines() if line.startswith("error: ")), message).removeprefix("error: ")
    if first.startswith("--config-name: no such configuration file"):
        return Reason("not recorded", "a configuration file of the script's own, which a recording does not hold")
    not_built = re.search(r"not built(?: yet)?: ([^.]+)", first)
    if not_built:
        return Reason("not built", not_built[1])
    return Reason("a relation or a value", re.sub(r"Got .*|/\S+|[0-9]+", "…", first)[:120])


# ---- what is shown ---------------------------------------------------------------------------------------------------


def by_group(results: list[Verdict], name: str) -> list[str]:
    """Rows of a table: how many scripts of each engine or category resolve."""
    rows = [f"| {name} | scripts | resolve | refused by name | an unknown key | a module is missing |"]
    rows.append("| --- | --- | --- | --- | --- | --- |")
    groups = Counter(getattr(verdict, name) for verdict in results)
    for group, count in groups.most_common():
        own = [verdict for verdict in results if getattr(verdict, name) == group]
        rows.append(f"| {group} | {count} | {_counts(own)} |")
    return [*rows, f"| all | {len(results)} | {_counts(results)} |"]


def _counts(own: list[Verdict]) -> str:
    """Each script counts once: the worst of its reasons."""
    kinds = [{reason.kind for reason in verdict.reasons} for verdict in own]
    missing = sum("module missing" in kind for kind in kinds)
    unknown = sum("unknown key" in kind and "module missing" not in kind for kind in kinds)
    resolve = sum(not kind for kind in kinds)
    return f"{resolve} | {len(own) - resolve - unknown - missing} | {unknown} | {missing}"


def blockers(results: list[Verdict]) -> list[tuple[Reason, int, int]]:
    """Every reason with the number of scripts it stands in the way of, and of those that it alone blocks."""
    every = Counter(reason for verdict in results for reason in verdict.reasons)
    alone = Counter(next(iter(verdict.reasons)) for verdict in results if len(verdict.reasons) == 1)
    return sorted(((reason, n, alone[reason]) for reason, n in every.items()), key=lambda row: (-row[1], row[0].name))


def report(results: list[Verdict]) -> str:
    """The figures as tables."""
    lines = [*by_group(results, "category"), "", *by_group(results, "engine"), ""]
    lines += ["| what stands in the way | kind | scripts | it alone |", "| --- | --- | --- | --- |"]
    for reason, count, alone in blockers(results):
        lines.append(f"| {_cell(reason.name)} | {reason.kind} | {count} | {alone or ''} |")
    return "\n".join(lines)


def _cell(text: str) -> str:
    return re.sub(r"\s+", " ", text).replace("|", "\\|")


def page(results: list[Verdict], commit: str) -> str:
    """docs/appendix/compatibility.md."""
    groups = {name: [v for v in results if v.category.startswith(name)] for name in ("examples and tests", "recipes")}
    shares = ", ".join(f"{sum(not v.reasons for v in own)} of {len(own)} {name}" for name, own in groups.items())
    resolved = sum(not verdict.reasons for verdict in results)
    without_uv = sum(not verdict.reasons and not verdict.by_uv for verdict in results)
    head = f"""# How many of upstream's commands resolve

{resolved} of {len(results)} recorded scripts resolve here: {shares}.
Measured on {date.today().isoformat()}; upstream's checkout: {commit}.

A script resolves when each of its commands gets through the `main(argv)` of its program until work would start, on a
pretended machine with every device, package and file. That says that its settings are understood and fit together, and
not that it was run: [coverage.md](coverage.md) and [install.md](../start/install.md#what-has-not-been-run) say that.
Scripts that train on images stand in rows of their own. {resolved - without_uv} of the scripts that resolve start Ray's
workers by `uv run` (`ray_kwargs.ray_init.runtime_env.py_executable`) and are refused where `uv` is not on the PATH:
there {without_uv} resolve, and [install.md](../start/install.md#uv) says what to do.

This page is written by `PYTHONPATH=. python scripts/compatibility.py COMMANDS.jsonl --write`; the same script records
such a file from a checkout of upstream: `--record UPSTREAM_FOLDER > COMMANDS.jsonl`. "It alone" counts scripts in whose
way nothing else stands.
"""
    return f"{head}\n{report(results)}\n"


def checkout_of(page: Path) -> str:
    """What a page that was written before says of upstream's checkout."""
    text = page.read_text(encoding="utf-8") if page.exists() else ""
    named = re.search(r"; upstream's checkout: (.+)\.$", text, re.M)
    return named[1] if named else "not recorded"


def main(argv: list[str] | None = None) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commands", nargs="?", type=Path, help="a recording, a JSON object per line")
    parser.add_argument("--record", type=Path, metavar="UPSTREAM_FOLDER", help="print a recording of this checkout")
    parser.add_argument("--list", action="store_true", help="show every script with its reasons")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(ROOT)}")
    parser.add_argument("--commit", default=None, help="upstream's commit or date, for the page; what it says now")
    args = parser.parse_args(argv)
    if args.record is not None:
        return recording.main(args.record)
    if args.commands is None:
        parser.error("name a recording, or a checkout with --record")
    results = verdicts(read_commands(args.commands))
    if args.list:
        for verdict in results:
            print(f"{'ok ' if not verdict.reasons else 'no '} {verdict.script} ({verdict.engine}, {verdict.category})")
            for reason, message in verdict.reasons.items():
                print(f"    {reason.kind}: {message[:300]}")
    print(report(results))
    if args.write:
        PAGE.write_text(page(results, args.commit or checkout_of(PAGE)), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
