"""Rollouts by servers, against a server in a thread that our own decode answers."""

from __future__ import annotations

import base64
import logging
import threading
import time

import pytest
import torch
from conftest import user_error
from fake_vllm import FakeVLLM
from folders import folder_of

from mvp_engine.data.batch import PackedBatch
from mvp_engine.kit.rl import server_rollout
from mvp_engine.kit.rl import server_rollout as server_module
from mvp_engine.kit.rl.prompts import Prompt
from mvp_engine.kit.rl.rollout import Sampling
from mvp_engine.kit.rl.server_rollout import LOGGER, NoServer, OpenAIRollout
from mvp_engine.kit.rl.vllm_rollout import VLLMRollout

SAMPLING = Sampling(max_new_tokens=6, samples=2, seed=3, stop=(2,))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    folder_of("qwen3", path)
    return path


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
    assert {sample.version for sample in samples} == {version}
    for sample in samples:
        assert (sample.tokens[-1] == 2) == (sample.reason == "stop")
        assert len(sample.tokens) == 6 or sample.reason == "stop"


def paths(fake):
    return [path for path, _ in fake.requests]


def test_vllm_rollout_after_sync_has_log_probs_of_the_sent_weights(fakes, folder, tmp_path):
    (tmp_path / "version-9-1234").mkdir()
    rollout = VLLMRollout([fake.url for fake in fakes], folder=tmp_path, concurrency=2)
    asked = prompts(9)
    found = []
    for version in (4, 5):
        model = trainer(folder, version)
        rollout.sync(buckets(model), version)
        samples = rollout.generate(asked, SAMPLING)
        check(samples, 9, version)
        assert worst_gap(model, asked, samples) < 1e-5
        found.append([sample.tokens for sample in samples])
    assert found[0] != found[1]
    assert rollout.generate(asked, SAMPLING) == samples  # the same seed, any server
    for fake in fakes:
        assert "/inference/v1/generate" in paths(fake)
        start = paths(fake).index("/pause?mode=wait")
        assert paths(fake)[start : start + 3] == [
            "/pause?mode=wait",
            "/update_weight_version",
            "/start_weight_update",
        ]
    (kept,) = tmp_path.iterdir()  # older weights are removed, also those of a run that was killed
    assert kept.name.startswith("version-5-")
    rollout.close()
    assert not tmp_path.exists()


def test_vllm_rollout_with_temperature_has_log_probs_at_that_temperature(fake, folder, tmp_path):
    model = trainer(folder, 1)
    rollout = VLLMRollout([fake.url], folder=tmp_path)
    rollout.sync(buckets(model), 1)
    hot = Sampling(max_new_tokens=6, temperature=1.7, stop=(2,))
    samples = rollout.generate(prompts(4), hot)
    assert worst_gap(model, prompts(4), samples, 1.7) < 1e-5
    assert worst_gap(model, prompts(4), samples) > 1e-2
    fake.processed = False
    with user_error(r"before temperature.*--logprobs-mode processed_logprobs"):
        VLLMRollout.generate(synced(fake, folder, tmp_path), prompts(4), hot)


def synced(fake, folder, tmp_path, **options):
    rollout = VLLMRollout([fake.url], folder=tmp_path / "weights", **options)
    rollout.sync(buckets(trainer(folder, 1)), 1)
    return rollout


def test_vllm_rollout_server_restarted_is_named_and_gets_the_weights_again(
    fake, folder, tmp_path, logged
):
    rollout = synced(fake, folder, tmp_path)
    before = rollout.generate(prompts(3), SAMPLING)
    fake.restart()
    assert rollout.generate(prompts(3), SAMPLING) == before
    assert f"{fake.url} has other weights (version default): it was restarted" in "\n".join(logged)


def test_vllm_rollout_other_trainer_changes_weights_during_generation_is_generated_again(
    fake, folder, tmp_path, logged
):
    rollout = synced(fake, folder, tmp_path, concurrency=1)
    before = rollout.generate(prompts(6), SAMPLING)
    other = VLLMRollout([fake.url], folder=tmp_path / "other")
    other_model = trainer(folder, 2)
    answer = fake.generate
    left = [3]

    def generate(body):
        left[0] -= 1
        if left[0] == 0:
            threading.Thread(target=other.sync, args=(buckets(other_model), 1)).start()
            until = time.monotonic() + 60
            while fake.version.startswith(rollout.name) and time.monotonic() < until:
                fake.lock.release()
                time.sleep(0.005)
                fake.lock.acquire()
            while fake.paused:
                fake.lock.release()
                time.sleep(0.005)
                fake.lock.acquire()
        return answer(body)

    fake.generate = generate  # type: ignore[method-assign]
    assert rollout.generate(prompts(6), SAMPLING) == before
    assert f"generated with other weights ({other.name}-1), not with {rollout.name}-1" in "\n".join(
        logged
    )


def test_vllm_rollout_server_killed_in_generation_others_complete_every_prompt_once(
    fakes,
    folder,
    tmp_path,
    logged,
    monkeypatch,
):
    rollout = VLLMRollout([fake.url for fake in fakes], folder=tmp_path, concurrency=2)
    rollout.sync(buckets(trainer(folder, 1)), 1)
    before = rollout.generate(prompts(12), SAMPLING)
    fakes[0].dies_at = "/inference/v1/generate"
    assert rollout.generate(prompts(12), SAMPLING) == before
    assert f"rollout server {fakes[0].url} does not answer" in "\n".join(logged)
    fakes[0].restart()
    monkeypatch.setattr(server_rollout, "RETRY_SECONDS", 0.0)
    assert rollout.generate(prompts(12), SAMPLING) == before
    assert f"rollout server {fakes[0].url} is back" in "\n".join(logged)


@pytest.mark.parametrize(
    "route", ["/start_weight_update", "/update_weights", "/finish_weight_update"]
)
def test_vllm_rollout_server_killed_in_sync_gets_the_weights_when_it_is_back(
    fakes, folder, tmp_path, route
):
    rollout = VLLMRollout([fake.url for fake in fakes], folder=tmp_path)
    fakes[0].dies_at = route
    model = trainer(folder, 1)
    rollout.sync(buckets(model), 1)
    fakes[0].restart()
    fakes[1].kill()
    samples = rollout.generate(prompts(2), SAMPLING)
    assert worst_gap(model, prompts(2), samples) < 1e-5


def test_vllm_rollout_server_whose_engine_died_in_a_request_is_gone_not_a_user_error(
    fakes, folder, tmp_path, logged
):
    rollout = VLLMRollout([fake.url for fake in fakes], folder=tmp_path)
    rollout.sync(buckets(trainer(folder, 1)), 1)
    before = rollout.generate(prompts(4), SAMPLING)
    fakes[0].generate = lambda body: (
        setattr(fakes[0], "engine_died", True) or fakes[0].answer("/", None)
    )  # type: ignore[method-assign]
    fakes[0].lock = threading.RLock()  # type: ignore[assignment]
    assert rollout.generate(prompts(4), SAMPLING) == before
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
        rollout.generate(prompts(2), SAMPLING)
    assert time.monotonic() - start < 60
    assert f"rollout server {fake.url} does not answer" in "\n".join(logged)


def test_vllm_rollout_server_that_stops_answering_in_a_long_request_is_noticed(
    fake, folder, tmp_path, request
):
    rollout = synced(fake, folder, tmp_path, wait_seconds=0.1)
    request.getfixturevalue("quick_health")

    def generate(body):
        fake.hangs = True
        while fake.hangs:  # until the end of the test
            time.sleep(0.01)

    fake.generate = generate  # type: ignore[method-assign]
    with pytest.raises(NoServer, match="TimeoutError"):
        rollout.generate(prompts(1), SAMPLING)


def test_vllm_rollout_after_a_trainer_killed_in_an_update_replaces_its_weights(
    fake, folder, tmp_path
):
    fake.paused = fake.updating = True
    fake.version = "mvp-0123-incomplete"
    rollout = synced(fake, folder, tmp_path)
    assert "/pause?mode=abort" in paths(fake)  # requests that wait in it would never finish
    assert worst_gap(trainer(folder, 1), prompts(2), rollout.generate(prompts(2), SAMPLING)) < 1e-5


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
    rollout.generate([prompt], SAMPLING)
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
        rollout.generate([prompt], SAMPLING)


def test_vllm_rollout_that_samples_a_placeholder_is_refused(fake, folder, tmp_path):
    rollout = synced(fake, folder, tmp_path)
    written = {
        token for sample in rollout.generate(prompts(2), SAMPLING) for token in sample.tokens
    }
    rollout.banned = sorted(written)
    with user_error("a placeholder of media, against its logit bias"):
        rollout.generate(prompts(2), SAMPLING)


def test_openai_rollout_samples_with_the_servers_weights_at_version_0(fake, folder):
    from transformers import AutoModelForCausalLM

    rollout = OpenAIRollout([f"{fake.url}/v1/"])
    rollout.sync(iter(()), 7)
    samples = rollout.generate(prompts(5), SAMPLING)
    check(samples, 5, 0)
    assert worst_gap(AutoModelForCausalLM.from_pretrained(folder), prompts(5), samples) < 1e-5


def test_openai_rollout_server_that_ignores_stop_tokens_is_cut_at_the_first(fake):
    rollout = OpenAIRollout([fake.url])
    full = rollout.generate(prompts(2), Sampling(max_new_tokens=6))
    stop = full[0].tokens[2]
    write = fake.write
    fake.write = lambda ids, parameters: write(ids, {**parameters, "stop_token_ids": ()})  # type: ignore[method-assign]
    cut = rollout.generate(prompts(2), Sampling(max_new_tokens=6, stop=(stop,)))
    assert cut[0].reason == "stop"
    assert cut[0].tokens == full[0].tokens[: full[0].tokens.index(stop) + 1]
    assert cut[0].log_probs == full[0].log_probs[: len(cut[0].tokens)]


def test_openai_rollout_server_with_stop_tokens_of_its_own_is_refused(fake):
    write = fake.write

    def ends_early(ids, parameters):
        return [
            (tokens[:3], log_probs[:3], "stop") for tokens, log_probs, _ in write(ids, parameters)
        ]

    fake.write = ends_early  # type: ignore[method-assign]
    with user_error(r"after 3 of 6 tokens.*stop tokens of its own"):
        OpenAIRollout([fake.url]).generate(prompts(1), Sampling(max_new_tokens=6))


def test_openai_rollout_without_token_ids_log_probs_or_with_media_is_refused(
    fake,
):
    rollout = OpenAIRollout([fake.url])
    with user_error(r"rows.jsonl:1: .*takes no media"):
        rollout.generate(prompts(1, ({"type": "image", "bytes": b""},)), SAMPLING)
    fake.has_token_ids = False
    with user_error("returns no token ids, only text"):
        rollout.generate(prompts(1), SAMPLING)
    fake.has_token_ids = True
    answer = fake.completions
    fake.completions = lambda body: {  # type: ignore[method-assign]
        "choices": [{**choice, "logprobs": None} for choice in answer(body)["choices"]]
    }
    with user_error("returns no log-probs"):
        rollout.generate(prompts(1), SAMPLING)


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://host", "http://"])
def test_rollout_url_that_is_none_is_refused(url):
    with user_error("is no URL of a server"):
        OpenAIRollout([url])


def test_server_warning_is_logged_once_while_it_is_gone(fakes, folder, tmp_path, logged):
    rollout = VLLMRollout([fake.url for fake in fakes], folder=tmp_path)
    fakes[0].kill()
    rollout.sync(buckets(trainer(folder, 1)), 1)
    rollout.generate(prompts(2), SAMPLING)
    rollout.generate(prompts(2), SAMPLING)
    assert "\n".join(logged).count("does not answer") == 1
