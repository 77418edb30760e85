"""The door for kits: tables of the package's folders, entry points of other packages."""

import importlib.util
import re

import pytest
import torch
from conftest import ROOT, losses, mvp, user_error
from tiny_engines import LM, adamw, engine_of, packed

from mvp_engine import plugins
from mvp_engine.model_engine import ModelSource, engine_class


@pytest.fixture
def install(tmp_path, own_registry, monkeypatch):
    """Install a package of one module, with entry points for an extension point."""
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


@pytest.mark.slow
def test_backend_of_an_installed_package_trains_and_resumes_as_fsdp_does(install, train, tmp_path):
    install("toy_backend", walk("Adding a backend"), module__plain="PlainEngine")
    words = ["lm.weights=true", "eval.steps=3", "optim.schedule=constant"]

    def trained(folder, backend, *steps):
        for step in steps:
            more = [f"model.backend={backend}", f"train.max_steps={step}", "resume=auto"]
            assert train(*words, *more, config=LM, dir=tmp_path / folder) == 0
        return losses(tmp_path / folder)

    straight = trained("plain", "plain", 6)
    assert straight == pytest.approx(trained("fsdp", "fsdp", 6), rel=1e-5)
    assert straight == trained("cut", "plain", 4, 6)


def test_model_type_of_an_installed_package_computes_exports_and_merges(install, tmp_path):
    code = walk("Adding a model type")
    install("toy_type", code, token_classifier__fsdp="TokenClassifierEngine")
    kind = engine_class("token_classifier")
    assert kind.__module__ == "toy_type"

    def logits_of(engine):
        return engine.infer_batch(packed(7, 3, 11, 2), ["class_logits"], budget=12)["class_logits"]

    engine = engine_of("qwen3", kind=kind, optimizer=adamw, seed=3)
    logits = logits_of(engine)
    assert logits.shape == (23, 3)
    assert logits.std() > 0
    engine.export_hf(tmp_path / "out")
    engine.save_checkpoint(tmp_path / "saved")
    assert mvp(f"export {tmp_path}/saved {tmp_path}/merged") == 0
    for folder in ("out", "merged"):
        model = kind.build_model(ModelSource(str(tmp_path / folder)))
        assert torch.equal(logits_of(engine_of(model, kind=kind, optimizer=None)), logits)


def test_model_engine_misspelt_lists_those_of_plugins(install):
    install("toy", "", toy_model__fsdp="Engine")
    with user_error(r"Did you mean toy_model\? Registered: .*toy_model on fsdp"):
        engine_class("toymodel")


def test_name_that_two_packages_add_is_an_error(install):
    install("one", "", toy__fsdp="Engine")
    install("two", "", toy__fsdp="Engine")
    with user_error(r"two plug-ins add 'toy.fsdp'.*: one:Engine and two:Engine"):
        plugins.names("model_engine")
