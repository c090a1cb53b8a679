"""An external library that leaves a file in the folder that an environment variable of its process names."""

import os
from pathlib import Path

folder = os.environ.get("SEEN_FOLDER")
if folder is not None:
    (Path(folder) / str(os.getpid())).write_text(os.environ.get("SEEN_COUNT", ""))
