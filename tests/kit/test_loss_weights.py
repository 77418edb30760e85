"""Weights in the loss that rows give: a number as the `loss` of a message, and the columns weight and loss_weight."""

import pytest
import torch
from conftest import ROOT, mvp, user_error
from run_files import json_lines
from templates.tiny import tokenizer
from test_loss import TINY, Logged
from tiny_vlm import chat, made, write
from transformers import Qwen3Config

from mvp_engine.data.batch import IGNORE
from mvp_engine.hf import LanguageModel
from mvp_engine.kit import TokenNormedLossKit
from mvp_engine.kit.data.read.row_types import BadRow
from mvp_engine.kit.data.read.rows import read_row
from mvp_engine.runs import list_runs


def turns(*losses):
    """A conversation whose answers have these losses; None: without one."""
    messages = []
    for index, loss in enumerate(losses):
        messages.append({"role": "user", "content": f"What is {index}?"})
        answer = {"role": "assistant", "content": f"It is {index}."}
        messages.append(answer if loss is None else {**answer, "loss": loss})
    return {"messages": messages}


def batch_of(folder, rows, **settings):
    kit = made(write(folder / "rows.jsonl", rows), tokenizer("qwen2_5"), **settings)
    return kit.sample(), kit


def model():
    torch.manual_seed(1)
    return LanguageModel.from_config(Qwen3Config(**{**TINY, "vocab_size": 400}))


def test_gradient_of_weighted_rows_is_that_of_a_weighted_mean_by_hand(tmp_path):
    rows = [
        turns(0.5, None),
        {**turns(2.0), "weight": 3},
        turns(None),
        {"text": "abc", "weight": 0.25},
    ]
    batch, _ = batch_of(tmp_path, rows)
    weights = batch.token_fields["weight"]
    found = {round(float(one), 4) for one in weights[batch.labels != IGNORE]}
    assert found == {0.5, 1.0, 6.0, 0.25}
    ours, theirs = model(), model()
    loss, weight = TokenNormedLossKit()(Logged(), ours, batch)
    (loss / weight).backward()
    hidden = theirs(batch, ["hidden_states"])["hidden_states"]
    logits = hidden @ theirs.hf.lm_head.weight.T
    labelled = batch.labels != IGNORE
    nll = torch.nn.functional.cross_entropy(
        logits[labelled], batch.labels[labelled], reduction="none"
    )
    ((nll * weights[labelled]).sum() / weights[labelled].sum()).backward()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(mine.grad, other.grad, rtol=1e-5, atol=1e-7)


def test_each_answer_has_its_own_weight_up_to_its_stop_token(tmp_path):
    batch, kit = batch_of(tmp_path, [turns(0.5, 2.0, None, False)])
    labelled = batch.labels != IGNORE
    weights = batch.token_fields["weight"][labelled].tolist()
    changes = [w for i, w in enumerate(weights) if i == 0 or w != weights[i - 1]]
    assert changes == [0.5, 2.0, 1.0]
    stop = kit.row_encoder.media.tokenizer.convert_tokens_to_ids("<|im_end|>")
    ends = [
        w
        for w, label in zip(weights, batch.labels[labelled].tolist(), strict=True)
        if label == stop
    ]
    assert ends == [0.5, 2.0, 1.0]


def test_rows_without_weights_have_no_field_and_weights_of_1_change_nothing(tmp_path):
    plain, _ = batch_of(tmp_path, [turns(None), turns(True)])
    assert "weight" not in plain.token_fields
    (tmp_path / "b").mkdir()
    same, _ = batch_of(tmp_path / "b", [{**turns(1.0), "weight": 1.0}, turns(1)])
    assert "weight" not in same.token_fields
    assert torch.equal(plain.labels, same.labels)


def test_weight_of_zero_masks_like_false():
    assert read_row(turns(0, 0.0, 1.0)).messages[1].loss is False
    with pytest.raises(BadRow, match="the weight of the row is 0"):
        read_row({**turns(None), "weight": 0})


@pytest.mark.parametrize(
    "row, detail",
    [
        (turns(-1), "wanted a weight in the loss, from 0 to 100"),
        (turns("high"), "wanted true, false or a weight in the loss"),
        ({**turns(None), "weight": 1850}, "columns: {weight: null}"),
        ({**turns(None), "loss_weight": float("nan")}, "wanted a weight"),
    ],
)
def test_number_that_is_no_weight_is_a_bad_row(row, detail):
    with pytest.raises(BadRow) as error:
        read_row(row)
    assert detail in error.value.detail


def test_weight_column_of_texts_stays_unread():
    row = read_row({**turns(None), "weight": "72 kg"})
    assert row.weight == 1.0
    assert row.unused == ("weight",)


def test_preference_pairs_with_weights_are_refused(tmp_path):
    pair = {"prompt": "Q", "chosen": "A", "rejected": "B", "weight": 2.0}
    kit = made(write(tmp_path / "rows.jsonl", [pair]), tokenizer("qwen2_5"), pairs=True)
    with user_error("bad_weight"):
        kit.sample()


def test_training_on_weights_is_the_same_for_any_packs(vlm_folder, capsys):
    rows = [{**chat(f"What is {i}?", f"It is {i}."), "weight": 1 + i % 3} for i in range(12)]
    write(vlm_folder / "rows.jsonl", rows)
    words = (
        "data.num_workers=0 eval.steps=null data.sources.rows.hold_out=null log.backends=[jsonl] "
    )
    words += "train.epochs=null train.max_steps=2 optim.warmup=0 log.interval=1 "
    for pack, packs in ((1024, 1), (64, 16)):
        sizes = (
            f"data.pack_tokens={pack} data.global_batch_tokens=null data.global_batch_size={packs}"
        )
        assert mvp(f"sft --model model --data rows.jsonl {words} {sizes} run_id=p{pack}") == 0
    one, many = (json_lines(run.dir / "metrics.jsonl") for run in list_runs(vlm_folder / "outputs"))
    first = {line["totals"]["tokens"]: line["loss"] for line in (one[0], many[0])}
    assert len(first) == 1 or one[0]["loss"] == pytest.approx(many[0]["loss"], rel=1e-5)
    assert (
        mvp("data prepare sft/lora prepared model.path=model data.sources.rows.path=rows.jsonl")
        == 2
    )
    assert "prepared rows do not keep" in capsys.readouterr().err


@pytest.mark.slow
def test_weights_in_the_packs_of_one_rank_give_the_loss_of_one_rank(vlm_folder, ranks2):
    """The ranks compute their losses by different outputs of the model, and gather the same weights."""
    rows = [chat(f"What is {i}?", f"It is {i}.") for i in range(8)]
    rows[3]["weight"] = 5
    write(vlm_folder / "rows.jsonl", rows)
    config = ROOT / "recipes" / "sft" / "configs" / "full.yaml"
    words = "model.path=model data.sources.rows.path=rows.jsonl data.sources.rows.hold_out=null data.num_workers=0 "
    words += "data.pack_tokens=64 data.global_batch_tokens=null data.global_batch_size=4 eval.steps=null "
    words += "train.epochs=null train.max_steps=3 optim.warmup=0 log.interval=1 export_link=null log.backends=[jsonl]"
    assert mvp(f"train {config}", *words.split(), "run_id=one") == 0
    more = [
        f"output_dir={vlm_folder}/outputs",
        f"model.path={vlm_folder}/model",
        "parallel.shard=2",
    ]
    more.append(f"data.sources.rows.path={vlm_folder}/rows.jsonl")
    assert ranks2.launch(config, *words.split(), *more, "run_id=two") == [0, 0]
    one, two = (json_lines(run.dir / "metrics.jsonl") for run in list_runs(vlm_folder / "outputs"))
    assert [line["loss"] for line in two] == pytest.approx([line["loss"] for line in one], rel=1e-4)
