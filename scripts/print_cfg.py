"""Print the resolved configuration of a program, without checking it against this machine.

python scripts/print_cfg.py [ppo_trainer|sft_trainer] [a.b=c ...] [--config-path DIR --config-name NAME]
"""

from __future__ import annotations

import sys

from verl.config.loading.configuration import load_config
from verl.config.loading.groups import NAMES
from verl.errors import ConfigError


def main(argv: list[str] | None = None) -> None:
    words = list(sys.argv[1:] if argv is None else argv)
    name = words.pop(0) if words and words[0] in NAMES else "ppo_trainer"
    wanted = [] if {"--help", "-h"} & set(words) else ["--cfg", "job"]
    try:
        load_config(name, [*words, *wanted])
    except ConfigError as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
