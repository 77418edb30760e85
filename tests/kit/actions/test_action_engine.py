"""Action models on layouts: losses and gradients of one plain rank, with shards, replicas, checkpointing, compile."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from conftest import CAMPAIGN, ROOT, read_metrics, user_error
from families import parallel
from kill_resume import ForkedJob, compare
from test_action_model import same_gradients, tiny_regressor, typed, vlm_row, with_actions
from tiny_models import close, samples
from tiny_pi0 import pi0_rows, tiny_pi0
from torch import Tensor

from mvp_engine.data.batch import PackedBatch
from mvp_engine.distributed import Layout, World
from mvp_engine.distributed.dtensor import full_tensor
from mvp_engine.kit.actions import ActionModelEngine
from mvp_engine.launch import launch
from mvp_engine.model_engine import Settings
from mvp_engine.runs import list_runs

CONFIG = ROOT / "tests" / "recipes" / "action" / "train.yaml"
PLAIN = Layout(World(0, 1, 0, 1, torch.device("cpu")))
Found = tuple[list[Tensor], dict[str, Tensor], dict[str, Tensor]]


def micro_batches(model, head):
    """Two, for one rank each. Of the co-training ones, one has actions alone and one has text without images."""
    if head == "regressor":
        rows = with_actions(samples(model, "qwen3_vl"))
        return [PackedBatch.concat(rows[1:]), rows[0]]
    rows = pi0_rows(model)
    if head == "pi0":
        return [PackedBatch.concat(rows[:2]), rows[2]]
    text = vlm_row(model, rows[0])
    ids = text.input_ids[-5:]
    is_answer = torch.arange(5) >= 2
    no_image = PackedBatch.from_sequences(
        [ids],
        [is_answer],
        token_fields={"token_type_ids": [is_answer.long()]},
        sequence_fields=text.sequence_fields,
        media={name: one.select([]) for name, one in text.media.items()},
    )
    return [PackedBatch.concat([typed(rows[1]), typed(rows[2])]), no_image]


def found(head, layout, **how):
    """Losses of each micro-batch of this rank; gradients; and the parameters after a step with weight decay."""
    model = tiny_regressor() if head == "regressor" else tiny_pi0()
    batches = micro_batches(model, head)[layout.data_rank :: layout.data_size]
    engine = ActionModelEngine(model, layout, Settings(**how))
    engine.initialize(lambda m: torch.optim.AdamW(m.parameters(), 1e-3, weight_decay=0.5))
    losses = []

    def loss(batch):
        names = ["action_losses", "loss"] if head == "co" else ["action_losses"]
        out = engine.model(batch, names)
        assert len(out["action_losses"]) == batch.num_sequences  # without dummies
        if not engine.is_dummy:
            losses.append(out["action_losses"].detach())
        return sum(value.sum() for value in out.values()), batch.num_sequences  # type: ignore[return-value]

    engine.optimizer_zero_grad()
    engine.forward_backward_batch(batches, loss)
    engine.optimizer_step()
    params = dict(engine.model.named_parameters())
    # After the step gradients are divided by the weight, and those of unused parameters are gone.
    grads = {name: full_tensor(p.grad) for name, p in params.items() if p.grad is not None}
    return losses, grads, {name: full_tensor(p.detach()).clone() for name, p in params.items()}


@functools.cache
def expected(head):
    return found(head, PLAIN)


def same(results, wanted, rank, ranks):
    losses, grads, params = results
    assert all(close(one, two) for one, two in zip(losses, wanted[0][rank::ranks], strict=True))
    assert grads.keys() == wanted[1].keys()
    same_gradients(grads, wanted[1])
    unused = wanted[2].keys() - wanted[1].keys()
    model = tiny_pi0()
    before = dict(model.named_parameters())
    for name in unused & before.keys():  # neither a zero gradient nor weight decay changes them
        assert torch.equal(params[name], before[name]), name


WAYS = [
    {"activation_checkpointing": "full"},
    {"activation_checkpointing": "selective"},
    {"compile": "aot_eager"},
]
BOTH = {"compile": "aot_eager", "activation_checkpointing": "full"}


LONG_WAYS = [pytest.param(one, marks=CAMPAIGN) for one in (*WAYS[1:], BOTH)]


@pytest.mark.parametrize("how", [WAYS[0], *LONG_WAYS], ids=str)
def test_pi0_checkpointed_and_compiled_blocks_equal_plain_ones(how):
    same(found("pi0", PLAIN, **how), expected("pi0"), 0, 1)


@pytest.mark.parametrize("how", [pytest.param(one, marks=CAMPAIGN) for one in WAYS], ids=str)
def test_regressor_checkpointed_and_compiled_blocks_equal_plain_ones(how):
    same(found("regressor", PLAIN, **how), expected("regressor"), 0, 1)


def test_pi0_step_leaves_the_eight_unused_tensors_unchanged():
    _, grads, params = expected("pi0")
    assert len(params) - len(grads) == 8
    same(expected("pi0"), expected("pi0"), 0, 1)


def on_ranks(heads, sizes, ways):
    world = World.join("cpu")
    layout = Layout.of(world, parallel(**sizes))
    results = [found(head, layout, **how) for head in heads for how in ways]
    world.close()
    return results


LONG = [{}, *WAYS, BOTH]


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes, heads, ways",
    [
        ({"shard": 2}, ["pi0", "co"], [{"activation_checkpointing": "full"}]),
        ({"replicate": 2}, ["pi0", "co"], [{}]),
        pytest.param({"shard": 2}, ["pi0", "co", "regressor"], LONG, marks=CAMPAIGN),
        pytest.param(
            {"replicate": 2},
            ["pi0", "co", "regressor"],
            LONG,
            marks=CAMPAIGN,
        ),
    ],
    ids=str,
)
def test_action_model_on_two_ranks_equals_one_rank(ranks2, sizes, heads, ways):
    wanted = [expected(head) for head in heads for _ in ways]
    for rank, results in enumerate(ranks2.run(on_ranks, heads, sizes, ways, timeout=900.0)):
        for one, other in zip(results, wanted, strict=True):
            same(one, other, rank, 2)


@pytest.mark.parametrize("key", ["tensor", "ulysses", "context", "pipeline"])
def test_action_model_unsupported_layout_is_a_user_error(key):
    from mvp_engine.kit.actions.action_model import ActionAdapter

    adapter = ActionAdapter(tiny_pi0())
    calls: dict[str, Any] = {
        "tensor": lambda: adapter.apply_tensor_parallel(None),  # type: ignore[arg-type]
        "pipeline": lambda: adapter.cut_stage(None, None),  # type: ignore[arg-type]
    }
    with user_error(f"parallel.{key} > 1 does not support model.type=action_model"):
        calls.get(key, lambda: _sequence_parallel(adapter, key))()


def _sequence_parallel(adapter, key):
    class Groups:
        keys = f"parallel.{key}"

    adapter.enable_sequence_parallel(Groups(), 1)


# ---- Trainings ----------------------------------------------------------------------------------------------------


def trained(folder, *words, ranks=None):
    given = [f"output_dir={folder}", *words]
    codes = [launch(str(CONFIG), given)] if ranks is None else ranks.launch(CONFIG, *given)
    assert set(codes) == {0}
    return read_metrics(folder) + read_metrics(folder, "eval")


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ["made.text_rows=true", "made.text_weight=0.5"],
        pytest.param(["made.head=regressor"], marks=CAMPAIGN),
        pytest.param([], marks=CAMPAIGN),
    ],
    ids=str,
)
@pytest.mark.campaign
def test_action_training_on_two_ranks_has_the_losses_and_actions_of_one(
    tmp_path, ranks2, words, campaign_size
):
    """Replicas are short in `test_action_engine_on_a_mixture_has_the_losses_of_one_rank`."""
    alone = trained(tmp_path / "alone", *words)
    for size in (2, 1)[: campaign_size(1, 2)]:  # shards; replicas
        together = trained(
            tmp_path / f"shard_{size}", *words, f"parallel.shard={size}", ranks=ranks2
        )
        for one, other in zip(alone, together, strict=True):
            for key in ("loss", "action_loss", "text_loss", "mean_action"):
                if key in one:
                    assert other[key] == pytest.approx(one[key], rel=2e-5), (size, key)


@pytest.mark.slow
def test_action_training_exports_what_transformers_loads_with_equal_velocities(
    tmp_path,
):
    """A folder in, a training, an export: no key is missing or unexpected; 1e-5."""
    from test_action_model import transformers_pi0
    from tiny_pi0 import reference
    from transformers import PI0ForConditionalGeneration

    from mvp_engine.kit.actions import ActionModel

    start = tiny_pi0()
    transformers_pi0(start).save_pretrained(tmp_path / "folder")
    trained(tmp_path / "run", f"made.folder={tmp_path / 'folder'}", "optim.lr=1e-2")
    export = next((tmp_path / "run").glob("*/export"))
    loaded, info = PI0ForConditionalGeneration.from_pretrained(
        export, output_loading_info=True, attn_implementation="eager"
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    engine = ActionModelEngine(ActionModel.on_meta(export), PLAIN, Settings())
    engine.initialize()
    for row in pi0_rows(start):
        velocity, _ = reference(loaded, row)
        assert close(engine.model(row, ["velocity"])["velocity"][0], velocity)
        assert not close(start(row, ["velocity"])["velocity"][0], velocity)  # it learnt


def test_action_training_resumed_is_bit_equal(tmp_path):
    words = ["checkpoint.interval=2", "checkpoint.keep_n=null"]
    straight = trained(tmp_path / "straight", *words)
    middle = list_runs(tmp_path / "straight")[-1].checkpoint_list()[0]
    assert middle.name == "step_00000002"
    assert trained(tmp_path / "resumed", *words, f"resume={middle}") == straight


@CAMPAIGN
def test_action_training_killed_and_resumed_is_bit_equal(tmp_path):
    kills = 5
    words = [f"train.max_steps={12 * kills}", "eval.steps=null", "checkpoint.interval=2"]
    words += ["log.backends=[file,jsonl]"]
    assert compare(kills, 1, words, tmp_path, config=CONFIG, start=ForkedJob)["bit_equal"]
