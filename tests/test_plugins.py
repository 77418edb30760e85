"""The door for kits: tables of the package's folders, entry points of other packages."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from typing import Any

import pytest
from conftest import ROOT

from mvp_engine import plugins
from mvp_engine.errors import UserError
from mvp_engine.model_engine import FSDPEngine, engine_class


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[EntryPoint]]:
    """Entry points of another package, for the test to add to."""
    entries: list[EntryPoint] = []
    monkeypatch.setattr(plugins, "entry_points", lambda group: [e for e in entries if e.group == group])
    plugins.names.cache_clear()
    yield entries
    plugins.names.cache_clear()


def test_every_name_of_the_package_can_be_imported_and_every_point_is_documented() -> None:
    page = (ROOT / "docs" / "plugins.md").read_text()
    assert re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE) == list(plugins.POINTS)
    for point in plugins.POINTS:
        for target in plugins.names(point).values():
            module, _, attribute = target.partition(":")
            assert importlib.util.find_spec(module), target
            assert attribute in (ROOT / f"{module.replace('.', '/')}.py").read_text(), target


def test_model_engine_of_another_package_is_found_by_type_and_backend(installed: list[EntryPoint]) -> None:
    target = "mvp_engine.model_engine:FSDPEngine"
    installed.append(EntryPoint("toy.outside", target, "mvp_engine.model_engine"))
    found: Any = engine_class("toy", "outside")
    assert found is FSDPEngine


def test_model_engine_misspelt_lists_those_of_plugins(installed: list[EntryPoint]) -> None:
    installed.append(EntryPoint("toy_model.fsdp", "x:y", "mvp_engine.model_engine"))
    with pytest.raises(UserError, match=r"Did you mean toy_model\? Registered: .*toy_model on fsdp"):
        engine_class("toymodel")


def test_name_that_two_packages_add_is_an_error(installed: list[EntryPoint]) -> None:
    for value in ("one:Engine", "two:Engine"):
        installed.append(EntryPoint("toy.fsdp", value, "mvp_engine.model_engine"))
    with pytest.raises(UserError, match=r"two plug-ins add 'toy.fsdp'.*one:Engine and two:Engine"):
        plugins.names("model_engine")
