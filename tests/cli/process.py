"""The command in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def kdo(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command from the source tree, wherever the tests run."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, "-m", "keras_diffusion_opd", *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "PYTHONPATH": path, **environment},
    )
