"""Puts the engine_shim package into the shim's wheel and sdist."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class ShimBuildHook(BuildHookInterface[Any]):
    """Includes engine_shim from beside this file (an sdist) or from the repository root."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the package to what hatchling packs; FileNotFoundError when it is in neither place."""
        here = Path(self.root)
        for package in (here / "engine_shim", here.parents[1] / "engine_shim"):
            if (package / "__init__.py").is_file():
                build_data["force_include"][str(package)] = "engine_shim"
                return
        raise FileNotFoundError(f"engine_shim is neither in {here} nor two folders above it: build from the repository")
