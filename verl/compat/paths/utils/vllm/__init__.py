"""What is known of the installed vLLM, under upstream's path."""

from importlib.metadata import version

from packaging.version import Version

from verl.compat import absent_names

__getattr__ = absent_names(__name__)


def is_version_ge(pkg: str = "vllm", minver: str = "0.7.3") -> bool:
    """Whether a package is installed in that version or a newer one."""
    return Version(version(pkg)) >= Version(minver)
