"""Each room of `hf` has a door: a table of the names that files outside of the room may import."""

from __future__ import annotations

import ast
import re
from importlib import import_module

import pytest
from conftest import ROOT

PACKAGE = ROOT / "mvp_engine"
ROOMS = sorted(file.parent.name for file in PACKAGE.glob("hf/*/__init__.py"))
FILES = [
    file for name in ("mvp_engine", "recipes", "benchmarks") for file in (ROOT / name).rglob("*.py")
]


def names_from(room, source):
    """(module, name) of what a file imports from a room; of a module as a whole, the attributes that it uses."""
    tree = ast.parse(source)
    used = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom):
            continue
        below = (node.module or "").removeprefix(f"mvp_engine.hf.{room}")
        if below == node.module or below[:1] not in ("", "."):
            continue
        if below:
            used |= {(below[1:], alias.name) for alias in node.names}
            continue
        modules = {alias.asname or alias.name: alias.name for alias in node.names}
        for child in ast.walk(tree):
            if isinstance(child, ast.Attribute) and ast.unparse(child.value) in modules:
                used.add((modules[ast.unparse(child.value)], child.attr))
    return used


@pytest.mark.parametrize("room", ROOMS)
def test_files_outside_of_a_room_import_only_names_of_its_door(room):
    table = import_module(f"mvp_engine.hf.{room}").DOOR
    door = {(module, name) for module, names in table.items() for name in names.split()}
    used: set[tuple[str, str]] = set()
    for file in FILES:
        if file.is_relative_to(PACKAGE / "hf" / room):
            continue
        source = file.read_text()
        names = names_from(room, source) if f"mvp_engine.hf.{room}" in source else set()
        assert names <= door, (
            f"{file.relative_to(ROOT)} passes the door of hf/{room}: {names - door}"
        )
        used |= names
    assert door <= used, f"nothing uses {door - used}"


def test_hf_has_at_most_six_rooms_and_45_files():
    assert len(ROOMS) <= 6
    assert len([*PACKAGE.glob("hf/**/*.py")]) <= 45


# Attributes of a PackedModel that are set after it was built, and the one file that sets each.
OWNERS = {
    "lora": "lora/lora_layers.py",
    "quantize": "lora/quantize.py",
    "expert_balance": "model/adapter.py",
    "from_folder": "weights/pretrained.py",
    "stage": "model/pipeline.py",
}
BY_METHOD = {"source", "side_files"}  # `use_folder` and `use_side_files`


def test_attributes_of_a_packed_model_have_one_owner_each():
    assigned = re.compile(rf"model\.({'|'.join([*OWNERS, *BY_METHOD])})\b.* = ")
    for file in PACKAGE.rglob("*.py"):
        source = file.read_text()
        if file.name == "packed_model.py" or not assigned.search(source):
            continue
        for node in ast.walk(ast.parse(source)):
            targets = node.targets if isinstance(node, ast.Assign) else []
            for target in targets:
                if not isinstance(target, ast.Attribute) or not ast.unparse(target.value).endswith(
                    "model"
                ):
                    continue
                assert target.attr not in BY_METHOD, file
                if target.attr in OWNERS:
                    assert file.relative_to(PACKAGE / "hf").as_posix() == OWNERS[target.attr]
