"""The recipes that come with the package, and their configs by name: `sft/lora`."""

from __future__ import annotations

from pathlib import Path

# The recipes of a checkout, which an editable install finds too; else those in the wheel.
_FOLDERS = (Path(__file__).parents[2] / "recipes", Path(__file__).parents[1] / "_recipes")
SHIPPED = next((folder for folder in _FOLDERS if folder.is_dir()), _FOLDERS[0])


def shipped_config(name: Path) -> Path | None:
    """The file of `recipe/config`, if the package has it."""
    file = SHIPPED / name.parent / "configs" / f"{name.name}.yaml"
    return file if len(name.parts) == 2 and file.is_file() else None


def shipped_configs(recipe: str) -> list[str]:
    """The names of a recipe's configs; empty if there is no such recipe."""
    return sorted(f"{recipe}/{file.stem}" for file in (SHIPPED / recipe / "configs").glob("*.yaml"))
