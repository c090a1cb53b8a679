"""What ``--help`` prints: the grammar, then every setting that works with its default and meaning."""

from __future__ import annotations

from verl.config.loading.groups import Program
from verl.config.schema.leaves import Leaf, schema_of


def usage(program: Program) -> str:
    """The help text of a program."""
    schema = schema_of(program.root)
    built = [leaf for leaf in schema.leaves.values() if leaf.planned is None]
    lines = [
        "Settings are given as key=value; lists as key=[a,b]; ~key resets one to its default.",
        "",
        "  --config-path DIR --config-name NAME   a YAML file over the defaults (the command line wins over it)",
        "  --cfg job                              print the resolved configuration and leave",
        "  --help                                 print this and leave",
        "",
        *(line(leaf) for leaf in built),
        "",
        f"{len(schema.every) - len(built)} more settings are known and belong to features that are not built yet.",
    ]
    return "\n".join(lines) + "\n"


def line(leaf: Leaf) -> str:
    """A setting with its default, meaning and choices."""
    value = "null" if leaf.default is None else str(leaf.default)
    choices = f" ({', '.join(str(choice) for choice in leaf.choices)})" if leaf.choices else ""
    return f"{leaf.key}={value}  {leaf.meaning}{choices}"
