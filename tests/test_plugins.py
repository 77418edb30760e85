"""The door for kits: tables of the package's folders, entry points of other packages."""

import importlib.util
import re

import pytest
import torch
from conftest import ROOT, losses, user_error
from families import overrides_of

from mvp_engine import plugins
from mvp_engine.data.batch import PackedBatch
from mvp_engine.distributed import Layout, World
from mvp_engine.model_engine import ModelSource, engine_class, registry

LM = ROOT / "tests" / "recipes" / "packed_lm" / "train.yaml"
ALONE = Layout(World(0, 1, 0, 1, torch.device("cpu")))


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Install a package of one module, with entry points for an extension point."""
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))
    monkeypatch.syspath_prepend(str(tmp_path))

    def run(name, code, point="model_engine", **targets):
        (tmp_path / f"{name}.py").write_text(code)
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        lines = [f"{key.replace('__', '.')} = {name}:{value}" for key, value in targets.items()]
        (info / "entry_points.txt").write_text("\n".join([f"[mvp_engine.{point}]", *lines]))
        plugins.names.cache_clear()

    yield run
    plugins.names.cache_clear()


def walk(section):
    """The code of a walk in docs/model_engine.md."""
    text = (ROOT / "docs" / "model_engine.md").read_text().split(f"## {section}\n")[1]
    return text.split("```python\n")[1].split("```")[0]


def test_every_name_of_the_package_can_be_imported_and_every_point_is_documented():
    page = (ROOT / "docs" / "plugins.md").read_text()
    assert re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE) == list(plugins.POINTS)
    for point in plugins.POINTS:
        for target in plugins.names(point).values():
            module, _, attribute = target.partition(":")
            assert importlib.util.find_spec(module), target
            assert attribute in (ROOT / f"{module.replace('.', '/')}.py").read_text(), target


def test_backend_of_an_installed_package_trains_as_fsdp_does(install, train, tmp_path):
    install("toy_backend", walk("Adding a backend"), module__plain="PlainEngine")
    words = ["loop.total_steps=3", "lm.weights=true"]
    assert train(*words, config=LM, dir=tmp_path / "fsdp") == 0
    assert train(*words, "model.backend=plain", config=LM, dir=tmp_path / "plain") == 0
    assert losses(tmp_path / "plain") == pytest.approx(losses(tmp_path / "fsdp"), rel=1e-5)


def test_model_type_of_an_installed_package_computes_its_outputs(install):
    code = walk("Adding a model type")
    install("toy_type", code, token_classifier__fsdp="TokenClassifierEngine")
    kind = engine_class("token_classifier")
    assert kind.__module__ == "toy_type"
    engine = kind(kind.build_model(ModelSource(None, overrides_of("qwen3"))), ALONE)
    engine.initialize()
    batch = PackedBatch.from_sequences([torch.arange(3, 9), torch.arange(4)])
    assert engine.infer_batch(batch, ["class_logits"])["class_logits"].shape == (10, 3)


def test_model_engine_misspelt_lists_those_of_plugins(install):
    install("toy", "", toy_model__fsdp="Engine")
    with user_error(r"Did you mean toy_model\? Registered: .*toy_model on fsdp"):
        engine_class("toymodel")


def test_name_that_two_packages_add_is_an_error(install):
    install("one", "", toy__fsdp="Engine")
    install("two", "", toy__fsdp="Engine")
    with user_error(r"two plug-ins add 'toy.fsdp'.*: one:Engine and two:Engine"):
        plugins.names("model_engine")
