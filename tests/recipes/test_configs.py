"""All shipped configs: each says when to use it."""

import re

import pytest
import yaml
from conftest import ROOT

CONFIGS = sorted(ROOT.glob("recipes/*/configs/*.yaml"))


def inherited(file):
    defaults = (yaml.safe_load(file.read_text()) or {}).get("defaults", [])
    return [file.with_name(f"{name}.yaml") for name in defaults if name != "_self_"]


BASES = {base for file in CONFIGS for base in inherited(file)}


@pytest.mark.parametrize("config", CONFIGS, ids=lambda file: f"{file.parts[-3]}/{file.stem}")
def test_config_begins_with_a_line_that_says_when_to_use_it(config):
    first = config.read_text().partition("\n")[0]
    assert re.match("# (Use it|Only inherited:) ", first), first
    if "Only inherited" in first:
        assert config in BASES
