"""The contrastive recipe: negatives of all micro-batches and ranks; one big batch equals any split; learning."""

from types import SimpleNamespace

import pytest
import torch
from conftest import CAMPAIGN, ROOT, read_metrics

from mvp_engine.config import compose
from mvp_engine.data import derived_seed, seed_everything
from mvp_engine.kit.preference import info_nce, siglip
from mvp_engine.launch import launch

CONFIG = ROOT / "recipes" / "contrastive" / "configs" / "train.yaml"
SHORT = "train.max_steps=4 eval.steps=4 log.interval=1 log.backends=[jsonl]".split()
SHORT += "data.global_batch_size=96 optim.warmup=0 towers.width=16 towers.embedding=8".split()


def trained(folder, *words, ranks=None):
    given = [*SHORT, f"output_dir={folder}", *words]
    if ranks is None:
        assert launch(str(CONFIG), given) == 0
    else:
        assert set(ranks.launch(CONFIG, *given)) == {0}
    return read_metrics(folder) + read_metrics(folder, "eval")


def plain_first_step(loss, *words):
    """Loss and gradient norm of the first step in plain PyTorch: one batch, one backward, no cache."""
    composed = compose(
        CONFIG, [*SHORT, f"contrastive.loss={loss}", "data.micro_batch_size=96", *words]
    )
    engine = object.__new__(composed.engine_class)
    engine.config, engine.device = composed.config, torch.device("cpu")
    engine.layout = SimpleNamespace(data_rank=0, data_size=1)
    seed_everything(derived_seed(engine.config.seed, "model"))
    model = engine.prepare_model()
    rows = next(iter(engine.prepare_dataloader("train")))
    torch.manual_seed(derived_seed(engine.config.seed, "contrastive", 1, 0, 0))
    views = model(*rows)
    logits = model.log_scale.exp() * views[:, 0] @ views[:, 1].T
    if loss == "siglip":
        signs = 2 * torch.eye(len(logits)) - 1
        value = -torch.log(torch.sigmoid(signs * (logits + model.bias))).sum() / len(logits)
    else:
        value = (logits.logsumexp(0) + logits.logsumexp(1) - 2 * logits.diagonal()).mean() / 2
    value.backward()
    grads = [param.grad for param in model.parameters() if param.grad is not None]
    return float(value.detach()), float(torch.nn.utils.get_total_norm(grads))


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["infonce", "siglip"])
def test_contrastive_any_split_and_ranks_equal_one_big_batch(tmp_path, ranks2, loss):
    words = [f"contrastive.loss={loss}"]
    wanted, norm = plain_first_step(loss)
    whole = trained(tmp_path / "whole", *words, "data.micro_batch_size=96")
    assert whole[0]["loss"] == pytest.approx(wanted, rel=1e-5)
    assert whole[0]["grad_norm"] == pytest.approx(norm, rel=1e-4)
    split = trained(tmp_path / "split", *words, "data.micro_batch_size=20")
    others = [split]
    if loss == "infonce":
        sizes = (["data.micro_batch_size=32"], ["data.micro_batch_size=7", "parallel.shard=2"])
        others += [
            trained(tmp_path / f"ranks{i}", *words, *size, ranks=ranks2)
            for i, size in enumerate(sizes)
        ]
    for other in others:
        for one, found in zip(whole, other, strict=True):
            assert found["loss"] == pytest.approx(one["loss"], rel=1e-5)
            if one["split"] == "train":
                assert found["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4)


@pytest.mark.slow
def test_contrastive_packed_media_any_split_and_sharded_ranks_equal_one_batch(tmp_path, ranks2):
    """In micro-batches of 4 rows, one sharded rank has no images in a forward in which the other one has."""
    config = ROOT / "tests" / "recipes" / "packed_views" / "train.yaml"
    found = []
    for name, words in (("whole", []), ("split", ["data.micro_batch_size=5"])):
        assert launch(str(config), [f"output_dir={tmp_path / name}", *words]) == 0
        found.append(read_metrics(tmp_path / name))
    words = [f"output_dir={tmp_path}/ranks", "data.micro_batch_size=4", "parallel.shard=2"]
    assert set(ranks2.launch(config, *words)) == {0}
    for records in (found[1], read_metrics(tmp_path / "ranks")):
        for one, other in zip(found[0], records, strict=True):
            assert other["loss"] == pytest.approx(one["loss"], rel=1e-5)
            assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4)
    assert found[0][1]["loss"] < found[0][0]["loss"]


def test_contrastive_dropout_has_the_same_masks_in_both_forwards(tmp_path):
    words = ["towers.dropout=0.5", "train.max_steps=1"]
    whole = trained(tmp_path, *words, "data.micro_batch_size=96")
    wanted, norm = plain_first_step("infonce", *words)
    assert whole[0]["loss"] == pytest.approx(wanted, rel=1e-5)
    assert whole[0]["grad_norm"] == pytest.approx(norm, rel=1e-4)


def test_contrastive_losses_equal_their_formulas():
    torch.manual_seed(0)
    views = torch.nn.functional.normalize(torch.randn(5, 2, 3), dim=-1)
    logits = views[:, 0] @ views[:, 1].T / 0.2
    wanted = -(logits.softmax(1).diagonal().log() + logits.softmax(0).diagonal().log()) / 2
    assert torch.allclose(info_nce(logits), wanted, atol=1e-6)
    signs = 2 * torch.eye(5) - 1
    assert torch.allclose(
        siglip(logits - 1), -torch.sigmoid(signs * (logits - 1)).log().sum(1), atol=1e-5
    )


@CAMPAIGN
@pytest.mark.parametrize("loss", ["infonce", "siglip"])
def test_contrastive_learns_held_out_numbers_both_ways(tmp_path, loss):
    words = [f"output_dir={tmp_path}", f"contrastive.loss={loss}", "log.backends=[jsonl]"]
    assert launch(str(CONFIG), words) == 0
    last = read_metrics(tmp_path, "eval")[-1]
    assert min(last["accuracy_first_to_second"], last["accuracy_second_to_first"]) >= 0.95
