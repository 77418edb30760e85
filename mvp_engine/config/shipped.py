"""Folders that come with the package: its recipes, with their configs by name (`sft/lora`), skills and docs."""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).parents[1]


def shipped_folder(name: str) -> Path:
    """A folder of the checkout, which an editable install finds too; else `_NAME` in the wheel (setup.py)."""
    in_wheel = PACKAGE / f"_{name}"
    return in_wheel if in_wheel.is_dir() else PACKAGE.parent / name


SHIPPED = shipped_folder("recipes")


def shipped_config(name: Path) -> Path | None:
    """The file of `recipe/config`, if the package has it."""
    file = SHIPPED / name.parent / "configs" / f"{name.name}.yaml"
    return file if len(name.parts) == 2 and file.is_file() else None


def shipped_configs(recipe: str = "*") -> list[str]:
    """The names of a recipe's configs, or of all; empty if there is no such recipe."""
    files = SHIPPED.glob(f"{recipe}/configs/*.yaml")
    return sorted(f"{file.parts[-3]}/{file.stem}" for file in files)
