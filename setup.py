"""A shim for tools that still call setup.py: all but one thing is in pyproject.toml.

A wheel brings gin/, configs/ and experiments/ too, inside the package; in a clone they lie beside it.
"""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class WithShare(build_py):
    """Copies what lies beside the package in a clone to `speccascade_jax/share`."""

    def run(self) -> None:
        """Builds the package, then copies the folders unless the installation is editable."""
        super().run()
        if self.editable_mode:
            return
        for folder in ("gin", "configs", "experiments"):
            to = Path(self.build_lib, "speccascade_jax", "share", folder)
            shutil.rmtree(to, ignore_errors=True)
            shutil.copytree(folder, to, ignore=shutil.ignore_patterns("__pycache__"))


setup(cmdclass={"build_py": WithShare})
