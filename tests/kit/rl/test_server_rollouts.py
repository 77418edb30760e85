"""Rollouts by servers, against a server in a thread that our own decode answers."""

from __future__ import annotations

import base64
import logging
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
from conftest import user_error
from fake_servers import FakeSGLang, FakeVLLM, Refused
from folders import folder_of
from tiny_vlm import saved_model

from mvp_engine.data.batch import PackedBatch
from mvp_engine.hf.lora.lora_settings import Lora
from mvp_engine.kit.rl import server_rollout as server_module
from mvp_engine.kit.rl.prompts import Prompt
from mvp_engine.kit.rl.rollout import Sampling, generate
from mvp_engine.kit.rl.server_rollout import LOGGER, NoServer, check_adapters
from mvp_engine.kit.rl.sglang_rollout import SGLangRollout
from mvp_engine.kit.rl.vllm_rollout import VLLMRollout
from mvp_engine.worker import WorkerGroup, WorkerSpec

SAMPLING = Sampling(max_new_tokens=6, samples=2, seed=3, stop=(2,))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    folder_of("qwen3", path)
    return path


KINDS: dict[str, Any] = {"vllm": (FakeVLLM, VLLMRollout), "sglang": (FakeSGLang, SGLangRollout)}


@pytest.fixture
def fakes(folder):
    started = [FakeVLLM(folder), FakeVLLM(folder)]
    yield started
    for fake in started:
        fake.hangs = False
        fake.kill()


@pytest.fixture
def fake(fakes):
    fakes[1].kill()
    return fakes[0]


@pytest.fixture(params=list(KINDS))
def either(request, folder):
    """A server of each kind, and the class of its rollout."""
    kind, rollout = KINDS[request.param]
    fake = kind(folder)
    yield fake, rollout
    fake.kill()


@pytest.fixture
def quick_health(monkeypatch):
    """Servers that hang are known sooner than by default."""
    assert server_module.HEALTH_EVERY + server_module.HEALTH_SECONDS < 10
    assert server_module.CONNECT_SECONDS < 10
    monkeypatch.setattr(server_module, "HEALTH_EVERY", 0.05)
    monkeypatch.setattr(server_module, "HEALTH_SECONDS", 0.3)


@pytest.fixture
def logged():
    """The log lines of a test."""
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    LOGGER.addHandler(handler)
    yield found
    LOGGER.removeHandler(handler)


def trainer(folder, seed):
    """A model of transformers whose weights differ from those of the folder."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return model


def buckets(model):
    named = list(model.named_parameters())
    for first in range(0, len(named), 5):
        yield [(name, tensor.detach()) for name, tensor in named[first : first + 5]]


def prompts(number, media=(), ids=None):
    found = []
    for key in range(number):
        text_ids = ids or [5 + key, 9, 11, 3 + key % 7]
        batch = PackedBatch.from_sequences([torch.tensor(text_ids)])
        found.append(
            Prompt(key, {}, batch, text_ids, list(media), "source", f"rows.jsonl:{key + 1}", key)
        )
    return found


def worst_gap(model, asked, samples, temperature=1.0):
    """The largest difference between a sampler's log-probs and transformers'."""
    worst = 0.0
    for sample in samples:
        ids = [*asked[sample.prompt].text_ids, *sample.tokens]
        with torch.no_grad():
            log_probs_TV = (model(torch.tensor([ids])).logits[0] / temperature).log_softmax(-1)
        first = len(ids) - len(sample.tokens) - 1
        ours = [float(log_probs_TV[first + at, token]) for at, token in enumerate(sample.tokens)]
        worst = max(worst, *(abs(a - b) for a, b in zip(ours, sample.log_probs, strict=True)))
    return worst


def check(samples, number, version):
    """Each prompt has its samples once, in order, by one version of the weights."""
    assert [sample.prompt for sample in samples] == [
        i for i in range(number) for _ in range(SAMPLING.samples)
    ]
    assert {one for sample in samples for one in sample.versions} == {version}
    for sample in samples:
        assert (sample.tokens[-1] == 2) == (sample.reason == "stop")
        assert len(sample.tokens) == 6 or sample.reason == "stop"


def token_gaps(model, prompt, sample):
    """How far each log-prob is from transformers'."""
    ids = [*prompt.text_ids, *sample.tokens]
    with torch.no_grad():
        log_probs_TV = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    first = len(prompt.text_ids) - 1
    ours = [float(log_probs_TV[first + at, token]) for at, token in enumerate(sample.tokens)]
    return [abs(a - b) for a, b in zip(ours, sample.log_probs, strict=True)]


def paths(fake):
    return [path for path, _ in fake.requests]


def test_vllm_rollout_after_sync_has_log_probs_of_the_sent_weights(fakes, folder, tmp_path):
    (tmp_path / "version-9-1234").mkdir()
    rollout = VLLMRollout([fake.url for fake in fakes], "file", tmp_path)
    asked = prompts(9)
    found = []
    for version in (4, 5):
        model = trainer(folder, version)
        rollout.sync(buckets(model), version)
        samples = generate(rollout, asked, SAMPLING)
        check(samples, 9, version)
        assert worst_gap(model, asked, samples) < 1e-5
        found.append([sample.tokens for sample in samples])
    assert found[0] != found[1]
    assert generate(rollout, asked, SAMPLING) == samples  # the same seed, any server
    for fake in fakes:
        assert "/inference/v1/generate" in paths(fake)
        start = paths(fake).index("/pause?mode=keep")
        assert paths(fake)[start : start + 3] == [
            "/pause?mode=keep",
            "/update_weight_version",
            "/start_weight_update",
        ]
    (kept,) = tmp_path.iterdir()  # older weights are removed, also those of a run that was killed
    assert kept.name.startswith("version-5-")
    rollout.close()
    assert not tmp_path.exists()


def test_vllm_rollout_with_temperature_has_log_probs_at_that_temperature(fake, folder, tmp_path):
    model = trainer(folder, 1)
    rollout = VLLMRollout([fake.url], "file", tmp_path)
    rollout.sync(buckets(model), 1)
    hot = Sampling(max_new_tokens=6, temperature=1.7, stop=(2,))
    samples = generate(rollout, prompts(4), hot)
    assert worst_gap(model, prompts(4), samples, 1.7) < 1e-5
    assert worst_gap(model, prompts(4), samples) > 1e-2
    fake.processed = False
    with user_error(r"before temperature.*--logprobs-mode processed_logprobs"):
        generate(synced(fake, folder, tmp_path), prompts(4), hot)


def synced(fake, folder, tmp_path, **options):
    rollout = VLLMRollout([fake.url], "file", tmp_path / "weights", **options)
    rollout.sync(buckets(trainer(folder, 1)), 1)
    return rollout


def test_vllm_rollout_server_restarted_is_named_and_gets_the_weights_again(
    fake, folder, tmp_path, logged
):
    rollout = synced(fake, folder, tmp_path)
    before = generate(rollout, prompts(3), SAMPLING)
    fake.restart()
    assert generate(rollout, prompts(3), SAMPLING) == before
    assert f"{fake.url} has other weights (version default): it was restarted" in "\n".join(logged)


def test_rollout_other_trainer_changes_weights_during_generation_is_generated_again(
    either, folder, tmp_path, logged
):
    fake, kind = either
    rollout, other = (kind([fake.url], "file", tmp_path / name) for name in ("ours", "other"))
    rollout.sync(buckets(trainer(folder, 1)), 1)
    before = generate(rollout, prompts(3), SAMPLING)
    fake.switch_after = 2
    futures = rollout.submit(prompts(1)[0], SAMPLING)
    pause = 0.3
    while fake.switch_after is not None:
        other.sync(buckets(trainer(folder, 2)), other.version or 1)
        time.sleep(pause)  # else every request is cut before its answer
        pause *= 2  # on a busy machine it takes longer
    assert [future.result() for future in futures] == before[:2]
    assert f"generated with other weights ({other.name}-1), not with {rollout.name}-1" in "\n".join(
        logged
    )


def test_vllm_rollout_server_killed_in_generation_others_complete_every_prompt_once(
    fakes,
    folder,
    tmp_path,
    logged,
):
    rollout = VLLMRollout([fake.url for fake in fakes], "file", tmp_path)
    rollout.sync(buckets(trainer(folder, 1)), 1)
    before = generate(rollout, prompts(12), SAMPLING)
    fakes[0].dies_at = "/inference/v1/generate"
    assert generate(rollout, prompts(12), SAMPLING) == before
    assert f"rollout server {fakes[0].url} does not answer" in "\n".join(logged)
    fakes[0].restart()
    rollout.sync(buckets(trainer(folder, 1)), 1)
    assert generate(rollout, prompts(12), SAMPLING) == before
    assert f"rollout server {fakes[0].url} is back" in "\n".join(logged)


@pytest.mark.parametrize(
    "route", ["/start_weight_update", "/update_weights", "/finish_weight_update"]
)
def test_vllm_rollout_server_killed_in_sync_gets_the_weights_when_it_is_back(
    fakes, folder, tmp_path, route
):
    rollout = VLLMRollout([fake.url for fake in fakes], "file", tmp_path)
    fakes[0].dies_at = route
    model = trainer(folder, 1)
    rollout.sync(buckets(model), 1)
    fakes[0].restart()
    fakes[1].kill()
    samples = generate(rollout, prompts(2), SAMPLING)
    assert worst_gap(model, prompts(2), samples) < 1e-5


def test_vllm_rollout_server_whose_engine_died_in_a_request_is_gone_not_a_user_error(
    fakes, folder, tmp_path, logged
):
    rollout = VLLMRollout([fake.url for fake in fakes], "file", tmp_path)
    rollout.sync(buckets(trainer(folder, 1)), 1)
    before = generate(rollout, prompts(4), SAMPLING)
    fakes[0].generate = lambda body: (
        setattr(fakes[0], "engine_died", True) or fakes[0].answer("/", None)
    )  # type: ignore[method-assign]
    fakes[0].lock = threading.RLock()  # type: ignore[assignment]
    assert generate(rollout, prompts(4), SAMPLING) == before
    assert [line for line in logged if "does not answer" in line and "HTTP 503: EngineCore" in line]


@pytest.mark.parametrize("fault", ["killed", "hangs"])
def test_vllm_rollout_without_any_server_raises_with_url_and_reason(
    fake,
    folder,
    tmp_path,
    fault,
    logged,
    request,
):
    rollout = synced(fake, folder, tmp_path, wait_seconds=0.2)
    if fault == "killed":
        fake.dies_at = "/inference/v1/generate"
    else:
        request.getfixturevalue("quick_health")
        fake.hangs = True
    start = time.monotonic()
    with pytest.raises(
        NoServer, match=rf"no server for 0.2 s:\n  {fake.url}: .*(Refused|[Tt]imed? ?out)"
    ):
        generate(rollout, prompts(2), SAMPLING)
    assert time.monotonic() - start < 60
    assert f"rollout server {fake.url} does not answer" in "\n".join(logged)


def test_vllm_rollout_server_that_stops_answering_in_a_long_request_is_noticed(
    fake, folder, tmp_path, request
):
    rollout = synced(fake, folder, tmp_path, wait_seconds=0.1)
    request.getfixturevalue("quick_health")

    def hang(body):
        fake.hangs = True
        while fake.hangs:  # until the end of the test
            time.sleep(0.01)

    fake.generate = hang  # type: ignore[method-assign]
    with pytest.raises(NoServer, match="TimeoutError"):
        generate(rollout, prompts(1), SAMPLING)


def test_vllm_rollout_after_a_trainer_killed_in_an_update_replaces_its_weights(
    fake, folder, tmp_path
):
    fake.paused = fake.updating = True
    fake.version = "mvp-0123-incomplete"
    rollout = synced(fake, folder, tmp_path)
    assert "/pause?mode=abort" in paths(fake)  # requests that wait in it would never finish
    assert worst_gap(trainer(folder, 1), prompts(2), generate(rollout, prompts(2), SAMPLING)) < 1e-5


def test_vllm_rollout_server_without_weight_transfer_is_refused_with_the_command(
    fake, folder, tmp_path
):
    fake.configured = False
    with user_error(r'not configured.*vllm serve MODEL.*--weight-transfer-config.*"mvp_file"'):
        synced(fake, folder, tmp_path)


def test_vllm_rollout_media_goes_unexpanded_and_another_expansion_is_refused(
    fake, folder, tmp_path
):
    png = tmp_path / "image.png"
    png.write_bytes(b"image file")
    media = ({"type": "image", "path": str(png)}, {"type": "image", "bytes": b"more"})
    (prompt,) = prompts(1, media, [5, 30, 9, 30])
    expanded = PackedBatch.from_sequences([torch.tensor([5, 30, 30, 9, 30, 30])])
    object.__setattr__(prompt, "batch", expanded)
    fake.media_token = 30
    fake.media_tokens = 2
    rollout = synced(fake, folder, tmp_path, banned=[30])
    generate(rollout, [prompt], SAMPLING)
    body = fake.requests[-1][1]
    assert body["token_ids"] == [5, 30, 9, 30]
    assert body["sampling_params"]["logit_bias"] == {"30": -100.0}
    urls = [part["url"] for part in body["content_parts"]]
    assert [base64.b64decode(url.removeprefix("data:image/png;base64,")) for url in urls] == [
        b"image file",
        b"more",
    ]
    fake.media_tokens = 3
    with user_error(r"rows.jsonl:1: 8 tokens against 6, first difference at 3.*expands image"):
        generate(rollout, [prompt], SAMPLING)


def test_vllm_rollout_that_samples_a_placeholder_is_refused(fake, folder, tmp_path):
    rollout = synced(fake, folder, tmp_path)
    written = {
        token for sample in generate(rollout, prompts(2), SAMPLING) for token in sample.tokens
    }
    rollout.banned = sorted(written)
    fake.bans = False
    with user_error("a placeholder of media, against its logit bias"):
        generate(rollout, prompts(2), SAMPLING)


def test_rollout_server_that_ignores_stop_tokens_is_cut_at_the_first(either, folder, tmp_path):
    fake, kind = either
    rollout = kind([fake.url], "file", tmp_path)
    rollout.sync(buckets(trainer(folder, 1)), 1)
    full = generate(rollout, prompts(2), Sampling(max_new_tokens=6))
    stop = full[0].tokens[2]
    write = fake.write
    fake.write = lambda ids, parameters, engine: write(
        ids, {**parameters, "stop_token_ids": ()}, engine
    )
    cut = generate(rollout, prompts(2), Sampling(max_new_tokens=6, stop=(stop,)))
    assert cut[0].reason == "stop"
    assert cut[0].tokens == full[0].tokens[: full[0].tokens.index(stop) + 1]
    assert cut[0].log_probs == full[0].log_probs[: len(cut[0].tokens)]
    assert len(cut[0].versions) == len(cut[0].tokens)


def test_rollout_server_with_stop_tokens_of_its_own_is_refused(either, folder, tmp_path):
    fake, kind = either
    rollout = kind([fake.url], "file", tmp_path)
    rollout.sync(buckets(trainer(folder, 1)), 1)
    write = fake.write

    def ends_early(*args):
        tokens, log_probs, _, versions = write(*args)
        return tokens[:3], log_probs[:3], "stop", versions[:3]

    fake.write = ends_early
    with user_error(r"after 3 of 6 tokens.*stop tokens of its own"):
        generate(rollout, prompts(1), Sampling(max_new_tokens=6))


def test_rollout_answer_of_another_form_is_refused_with_the_server(either, folder, tmp_path):
    fake, kind = either
    rollout = kind([fake.url], "file", tmp_path)
    rollout.sync(buckets(trainer(folder, 1)), 1)
    fake.generate = lambda body: {"choices": [], "meta_info": {}}
    with user_error(rf"{fake.url} returned an answer of another form"):
        generate(rollout, prompts(1), SAMPLING)


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://host", "http://"])
def test_rollout_url_that_is_none_is_refused(url, tmp_path):
    with user_error("is no URL of a server"):
        VLLMRollout([url], "file", tmp_path)


# Both kinds of servers, against the same promises.


def test_rollout_of_each_kind_after_sync_has_log_probs_of_the_sent_weights(
    either, folder, tmp_path
):
    fake, kind = either
    rollout = kind([fake.url], "file", tmp_path)
    for version in (1, 2):
        model = trainer(folder, version)
        rollout.sync(buckets(model), version)
        samples = generate(rollout, prompts(3), SAMPLING)
        check(samples, 3, version)
        assert worst_gap(model, prompts(3), samples) < 1e-5
    fake.restart()  # it has its first weights again
    assert generate(rollout, prompts(3), SAMPLING) == samples
    rollout.close()
    assert not tmp_path.exists()


def test_rollout_weights_switched_in_flight_have_a_version_for_each_token(either, folder, tmp_path):
    fake, kind = either
    rollout = kind([fake.url], "file", tmp_path)
    first, second = trainer(folder, 1), trainer(folder, 2)
    rollout.sync(buckets(first), 1)
    fake.switch_after = 4
    how = Sampling(max_new_tokens=9)
    (future,) = rollout.submit(prompts(1)[0], how)
    while "generate" not in paths(fake)[-1]:
        time.sleep(0.01)
    rollout.sync(buckets(second), 2)
    sample = future.result()
    assert sample.versions == [1] * 4 + [2] * 5
    for model, part in ((first, slice(0, 4)), (second, slice(4, 9))):
        gaps = token_gaps(model, prompts(1)[0], sample)
        assert max(gaps[part]) < 1e-5
        assert max(gaps) > 1e-2


def test_sglang_rollout_of_a_version_without_spans_generates_again_what_ran_in_an_update(
    folder, tmp_path
):
    fake = FakeSGLang(folder)
    fake.has_spans = False
    rollout = SGLangRollout([fake.url], "file", tmp_path)
    rollout.sync(buckets(trainer(folder, 1)), 1)
    fake.switch_after = 2
    (future,) = rollout.submit(prompts(1)[0], Sampling(max_new_tokens=5))
    while "generate" not in paths(fake)[-1]:
        time.sleep(0.01)
    model = trainer(folder, 2)
    rollout.sync(buckets(model), 2)
    assert future.result().versions == [2] * 5
    assert worst_gap(model, prompts(1), [future.result()]) < 1e-5
    fake.kill()


def test_sglang_rollout_log_probs_before_the_temperature_are_refused(folder, tmp_path):
    fake = FakeSGLang(folder)
    rollout = SGLangRollout([fake.url], "file", tmp_path)
    rollout.sync(buckets(trainer(folder, 1)), 1)
    how = Sampling(max_new_tokens=4, temperature=0.7)
    assert len(generate(rollout, prompts(1), how)) == 1
    fake.processed_temperature = False
    with user_error(r"before temperature or logit biases.*SGLANG_RETURN_ORIGINAL_LOGPROB"):
        other = SGLangRollout([fake.url], "file", tmp_path / "other")
        other.sync(buckets(trainer(folder, 1)), 1)
        generate(other, prompts(1), how)
    fake.kill()


def test_rollout_sends_media_of_a_prompt_to_each_kind_of_server(either, folder, tmp_path):
    fake, kind = either
    media = [{"type": "image", "bytes": b"one"}, {"type": "image", "bytes": b"two"}]
    (prompt,) = prompts(1, media, [5, 30, 9, 30])
    expanded = PackedBatch.from_sequences([torch.tensor([5, 30, 30, 9, 30, 30])])
    object.__setattr__(prompt, "batch", expanded)
    fake.media_token = 30
    fake.media_tokens = 2
    rollout = kind([fake.url], "file", tmp_path, banned=[30])
    rollout.sync(buckets(trainer(folder, 1)), 1)
    generate(rollout, [prompt], SAMPLING)
    body = fake.requests[-1][1]
    urls = body.get("image_data") or [part["url"] for part in body["content_parts"]]
    assert [base64.b64decode(url.partition(",")[2]) for url in urls] == [b"one", b"two"]
    fake.media_tokens = 3
    with user_error("8 tokens against 6, first difference at 3.*expands image"):
        generate(rollout, [prompt], SAMPLING)


def test_rollout_releases_a_server_that_can_sleep_until_the_next_sync(either, folder, tmp_path):
    fake, kind = either
    rollout = kind([fake.url], "file", tmp_path)
    rollout.sync(buckets(trainer(folder, 1)), 1)
    rollout.release()
    assert not fake.asleep  # it was not started for that
    fake.sleeps = True
    rollout.release()
    assert fake.asleep == {"weights", "kv_cache"}
    model = trainer(folder, 2)
    rollout.sync(buckets(model), 2)  # the server checks that its weights are there
    assert not fake.asleep
    assert worst_gap(model, prompts(2), generate(rollout, prompts(2), SAMPLING)) < 1e-5


# Adapters alone.


@pytest.fixture(scope="module")
def adapters(folder):
    """A worker group with adapters that differ from 0, as its worker too."""
    group = WorkerGroup.start(WorkerSpec.of(str(folder), device="cpu", lora=Lora(rank=2)))
    return group, model_of(group)


def model_of(group):
    (rank,) = group.processes.launcher.ranks
    return rank.host.workers[group.name].engine.model


def change(model, seed):
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.2)


def test_rollout_with_adapters_alone_samples_as_with_merged_weights(
    either, folder, tmp_path, adapters
):
    fake, kind = either
    group, model = adapters
    alone = kind([fake.url], "adapter", tmp_path / "adapters")
    other = type(fake)(folder)
    merged = kind([other.url], "file", tmp_path / "weights")
    for version in (1, 2):
        change(model, version)
        alone.sync(group.export_adapter, version)
        merged.sync(group.weights(dtype=torch.float32), version)
        found, expected = (generate(one, prompts(3), SAMPLING) for one in (alone, merged))
        check(found, 3, version)
        assert [one.tokens for one in found] == [one.tokens for one in expected]
        for one, two in zip(found, expected, strict=True):
            assert one.log_probs == pytest.approx(two.log_probs, abs=1e-5)
    assert list(fake.adapters) == [alone.label]  # the older one was unloaded
    assert [path.name[:10] for path in (tmp_path / "adapters").iterdir()] == ["version-2-"]
    fake.restart()
    assert generate(alone, prompts(3), SAMPLING) == found
    other.kill()


def test_rollout_keeps_an_adapter_as_long_as_a_request_uses_it(either, tmp_path, adapters):
    fake, kind = either
    group, model = adapters
    rollout = kind([fake.url], "adapter", tmp_path)
    change(model, 1)
    rollout.sync(group.export_adapter, 1)
    ended = threading.Event()
    write = fake.write

    def held(*args):
        while not ended.is_set():
            fake.unlocked()
        return write(*args)

    fake.write = held
    (future,) = rollout.submit(prompts(1)[0], Sampling(max_new_tokens=4))
    while "generate" not in paths(fake)[-1]:
        time.sleep(0.01)
    for version in (2, 3):
        rollout.sync(group.export_adapter, version)
    assert [name[-1] for name in fake.adapters] == ["1", "3"]
    ended.set()
    assert future.result().versions == [1] * 4


def test_rollout_adapter_that_a_server_does_not_load_is_a_user_error(fake, tmp_path, adapters):
    group, _ = adapters

    def refuse(body):
        raise Refused(500, "rank 2 is too high")

    fake.load_adapter = refuse
    rollout = VLLMRollout([fake.url], "adapter", tmp_path)
    with user_error(r"rank 2 is too high.*VLLM_ALLOW_RUNTIME_LORA_UPDATING=1.*--enable-lora"):
        rollout.sync(group.export_adapter, 1)


@pytest.mark.parametrize("targets", [["llm"], ["vision"], ["llm", "vision"]])
def test_adapters_that_servers_leave_out_are_refused(targets, tmp_path):
    lora = Lora(rank=2, target_modules=targets)
    path = str(saved_model(tmp_path))
    spec = WorkerSpec.of(path, device="cpu", optim={}, total_steps=1, lora=lora)
    group = WorkerGroup.start(spec)
    model = model_of(group)
    if targets == ["llm"]:
        check_adapters(model)
        return
    with user_error(r"generation.sync=adapter: .*visual\S*lora\S* is trained.*sync=file"):
        check_adapters(model)


def test_routed_experts_of_a_server_are_those_of_its_samples_if_asked_for(fake, folder, tmp_path):
    rollout = synced(fake, folder, tmp_path)
    fake.experts = np.arange(8 * 3 * 2, dtype=np.uint8).reshape(8, 3, 2)
    (sample,) = generate(rollout, prompts(1), Sampling(max_new_tokens=5, experts=True))
    assert sample.experts is not None
    assert sample.experts.dtype == torch.int16
    assert sample.experts.tolist() == fake.experts.tolist()
    (sample,) = generate(rollout, prompts(1), Sampling(max_new_tokens=5))
    assert sample.experts is None


def test_server_warning_is_logged_once_while_it_is_gone(fakes, folder, tmp_path, logged):
    rollout = VLLMRollout([fake.url for fake in fakes], "file", tmp_path)
    fakes[0].kill()
    rollout.sync(buckets(trainer(folder, 1)), 1)
    generate(rollout, prompts(2), SAMPLING)
    generate(rollout, prompts(2), SAMPLING)
    assert "\n".join(logged).count("does not answer") == 1


def test_closed_rollout_sends_its_requests_to_no_other_server(fakes, folder, tmp_path, logged):
    rollout = VLLMRollout([fake.url for fake in fakes], "file", tmp_path)
    rollout.sync(buckets(trainer(folder, 1)), 1)
    begun, may_end = threading.Event(), threading.Event()

    def wait(body):
        begun.set()
        may_end.wait(60)

    fakes[0].generate = wait  # type: ignore[method-assign]
    (future,) = rollout.submit(prompts(1)[0], Sampling(max_new_tokens=5))
    assert begun.wait(60)
    rollout.close()
    with pytest.raises(NoServer):
        future.result(30)
    may_end.set()
    assert "/inference/v1/generate" not in paths(fakes[1])
    assert not logged
