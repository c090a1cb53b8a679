"""Convert a Hugging Face folder into one whose weights are Megatron-Core's; it is taken as ``model.path``.

python scripts/converter_hf_to_mcore.py --hf_model_path DIR --output_path DIR [--test]

Under torchrun the processes share the layers.
"""

from __future__ import annotations

import argparse
import sys

from verl import distributed
from verl.errors import VerlError
from verl.metrics import notice
from verl.models.megatron_conversion import convert_to_megatron, differences

NO_EFFECT = {
    "pp_size": "what is written does not depend on parallel sizes; processes of torchrun share the layers",
    "ep_size": "what is written does not depend on parallel sizes; processes of torchrun share the layers",
    "use_cpu_initialization": "everything here is done on the CPU",
}


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hf_model_path", required=True, help="folder with config.json and safetensors")
    parser.add_argument("--output_path", required=True, help="folder to write")
    parser.add_argument("--test", action="store_true", help="read it back and compare every bit")
    parser.add_argument("--trust_remote_code", action="store_true", help="run configuration code of the folder")
    for name in ("pp_size", "ep_size"):
        parser.add_argument(f"--{name}", type=int, default=1, help=f"no effect: {NO_EFFECT[name]}")
    parser.add_argument("--use_cpu_initialization", action="store_true", help="no effect: the CPU does it all")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status."""
    a = arguments(argv)
    try:
        ranks = distributed.join_group(device="cpu")
        for name, why in NO_EFFECT.items():
            if vars(a)[name] not in (1, False):
                notice(f"--{name}", f"has no effect: {why}")
        target = convert_to_megatron(a.hf_model_path, a.output_path, trust_remote_code=a.trust_remote_code, ranks=ranks)
        found = differences(a.hf_model_path, target, ranks) if a.test else []
        if ranks.is_first:
            print(f"wrote {target}" + (", equal bit for bit" if a.test and not found else ""))
            print("\n".join(f"differs: {name}" for name in found), end="\n" if found else "")
        distributed.leave_group()
    except VerlError as error:
        print(error, file=sys.stderr)
        return 1
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
