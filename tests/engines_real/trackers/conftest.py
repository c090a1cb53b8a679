"""The packages of trackers themselves, offline; a file is collected where its packages are installed: ``make
test-trackers`` sets up such an environment."""

from __future__ import annotations

import importlib.util

NEEDED = {
    "test_offline.py": ("mlflow", "swanlab", "wandb"),
    "test_traces.py": ("mlflow", "swanlab", "wandb"),
    "test_clearml.py": ("clearml",),
    "test_prometheus.py": ("prometheus_client",),
    "test_trackio.py": ("trackio",),
}
PACKAGES = sorted({package for packages in NEEDED.values() for package in packages})
MISSING = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
collect_ignore = [file for file, packages in NEEDED.items() if not set(packages).isdisjoint(MISSING)]


def pytest_report_header() -> str:
    left_out = f", without {', '.join(collect_ignore)}: {' and '.join(MISSING)} not installed" if MISSING else ""
    return f"trackers: collected{left_out}"
