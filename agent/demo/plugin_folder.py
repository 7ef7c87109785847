"""Lets an engine in another environment find the shim as if it were installed there, with nothing written to it."""

from __future__ import annotations

from pathlib import Path

import engine_shim

# As in pyproject.toml, and a test holds it to that. Not read from what is installed: a checkout that was set up before
# the entry point came would have none.
GROUP, ENTRY_POINT = "vllm.general_plugins", "kvatlas = engine_shim.adapters.vllm:register"


def make_plugin_folder(folder: Path) -> Path:
    """Make a folder for PYTHONPATH: the shim's package alone, and its entry point, which is how vLLM finds it."""
    about = folder / f"kvatlas_shim-{engine_shim.__version__}.dist-info"
    about.mkdir(parents=True)
    (folder / "engine_shim").symlink_to(Path(engine_shim.__file__).parent, target_is_directory=True)
    name = f"Metadata-Version: 2.1\nName: kvatlas-shim\nVersion: {engine_shim.__version__}\n"
    (about / "METADATA").write_text(name)
    (about / "entry_points.txt").write_text(f"[{GROUP}]\n{ENTRY_POINT}\n")
    return folder
