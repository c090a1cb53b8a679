"""``verl doctor``: what a bug report needs: system, devices, versions against the tested ones, the shell's settings."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from verl import __version__, env
from verl.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)
SHOWN_ALSO = ("RAY_ADDRESS", "PYTHONPATH", "LD_LIBRARY_PATH", "TENSORBOARD_DIR")


def print_section(title: str, rows: list[tuple[str, str]]) -> None:
    print(f"\n{title}")
    width = max((len(name) for name, _ in rows), default=0)
    for name, value in rows:
        print(f"  {name:<{width}}  {value}")


def required_packages() -> list[str]:
    """Packages that the library or one of its extras requires, in the order of their names."""
    required = importlib.metadata.requires("verl") or []
    return sorted({re.split(r"[^\w.-]", line, maxsplit=1)[0] for line in required} | {"flash-attn"})


def package_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def system() -> list[tuple[str, str]]:
    kilobytes = int(Path("/proc/meminfo").read_text().split(None, 2)[1])
    shared = Path("/dev/shm")
    return [
        ("platform", platform.platform()),
        ("python", f"{sys.version.split()[0]} at {sys.executable}"),
        ("cores", f"{len(os.sched_getaffinity(0))} usable of {os.cpu_count()}"),
        ("memory", f"{kilobytes / 2**20:.1f} GiB"),
        ("free disk here", f"{shutil.disk_usage('.').free / 2**30:.1f} GiB"),
        ("/dev/shm", f"{shutil.disk_usage(shared).total / 2**30:.1f} GiB" if shared.exists() else "there is none"),
    ]


def devices() -> list[tuple[str, str]]:
    try:
        import torch
    except ImportError as error:
        return [("torch", f"cannot be imported: {error}")]
    rows = [("torch", f"{torch.__version__}, CUDA {torch.version.cuda}, HIP {torch.version.hip}")]
    rows.append(("threads", str(torch.get_num_threads())))
    rows.append(("CPU capability", torch.backends.cpu.get_cpu_capability()))
    for i in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(i)
        rows.append((f"cuda:{i}", f"{card.name}, {card.total_memory / 2**30:.0f} GiB"))
    if torch.cuda.is_available() and torch.distributed.is_nccl_available():
        rows.append(("NCCL", ".".join(map(str, torch.cuda.nccl.version()))))
    return rows


def pins() -> dict[str, str]:
    file = ROOT / "constraints.txt"
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))


def packages() -> list[tuple[str, str]]:
    tested = pins()
    rows = []
    for name in required_packages():
        have, want = package_version(name), tested.get(name)
        if have is None:
            rows.append((name, "-"))
        else:
            differs = want is not None and have.split("+")[0] != want
            rows.append((name, have + (f"   (tested with {want})" if differs else "")))
    return rows


def library() -> list[tuple[str, str]]:
    rows = [("verl", f"{__version__} at {ROOT / 'verl'}")]
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    try:
        rows.append(("commit", subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()))
    except (OSError, subprocess.CalledProcessError):
        rows.append(("commit", "not a git checkout"))
    return rows


def shell() -> list[tuple[str, str]]:
    everything = env.whole()
    names = sorted({*env.forwarded(), *(name for name in SHOWN_ALSO if name in everything)})
    return [(name, "(hidden)" if SECRET.search(name) else everything[name]) for name in names] or [("(none)", "")]


def main(argv: Sequence[str] = ()) -> int:
    """Print the report.

    Raises:
        ConfigError: it takes no words.
    """
    if argv:
        raise ConfigError("the report takes no words", key="verl doctor", got=" ".join(argv))
    print("verl environment report")
    print_section("Library", library())
    print_section("System", system())
    print_section("Devices", devices())
    print_section("Packages", packages())
    print_section("Shell variables that reach the workers", shell())
    return 0
