"""The wheel also holds recipes, skills and docs, as mvp_engine/_recipes, mvp_engine/_skills and mvp_engine/_docs."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
IGNORED = shutil.ignore_patterns("__pycache__", "*.pyc", "outputs", "images")


class BuildWithRecipes(build_py):
    def run(self) -> None:
        super().run()
        if self.editable_mode:  # an editable install finds them in the checkout
            return
        for name in ("recipes", "skills", "docs"):
            target = Path(self.build_lib) / "mvp_engine" / f"_{name}"
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(ROOT / name, target, ignore=IGNORED)


setup(cmdclass={"build_py": BuildWithRecipes})
