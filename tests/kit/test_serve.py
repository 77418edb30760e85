"""`mvp serve`: answers of the endpoint equal those of `mvp chat` and transformers; streams, errors, clients that go."""

import base64
import http.client
import json
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

import pytest
import test_chat
import torch
from conftest import ROOT, mvp, user_error, wait_until
from mixer_families import mixer_model

from mvp_engine.cli import build_parser
from mvp_engine.data.batch import PackedBatch
from mvp_engine.distributed import Layout, World
from mvp_engine.kit.decoding import Decoding, complete
from mvp_engine.kit.openai_server import OpenAIServer
from mvp_engine.kit.serving import BatchedDecoder, Request, Written
from mvp_engine.model_engine import LanguageModelEngine
from mvp_engine.tools.chat import ChatModel
from mvp_engine.tools.serve import Endpoint, sglang_options, vllm_options

folder = test_chat.folder
image = test_chat.image
NEW = test_chat.NEW
TEXTS = ["What colour is this?", "red", "blue green", "user assistant"]


@pytest.fixture(scope="module")
def endpoint(folder):
    endpoint = Endpoint("tiny", max_batch=8)
    endpoint.load(ChatModel(folder))
    yield endpoint
    endpoint.close()


@pytest.fixture(scope="module")
def port(endpoint):
    server = OpenAIServer(endpoint.posts(), ["tiny"])
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield server.server_port
    server.shutdown()
    server.server_close()


def post(port, path="chat/completions", **request):
    data = request.pop("data", None) or json.dumps(request).encode()
    url = f"http://127.0.0.1:{port}/v1/{path}"
    with urllib.request.urlopen(urllib.request.Request(url, data), timeout=60) as answer:
        return answer.read().decode()


def ask(port, text, **request):
    messages = text if isinstance(text, list) else [{"role": "user", "content": text}]
    request = {"max_tokens": NEW, "temperature": 0, "return_token_ids": True, **request}
    return json.loads(post(port, messages=messages, **request))


def refused(port, path="chat/completions", **request):
    with pytest.raises(urllib.error.HTTPError) as error:
        post(port, path, **request)
    return error.value.code, json.loads(error.value.read())["error"]


def events(text):
    assert text.endswith("data: [DONE]\n\n")
    return [json.loads(line[6:]) for line in text.split("\n\n") if line.startswith("data: {")]


def test_endpoint_greedy_answers_of_concurrent_clients_equal_transformers(
    folder, image, endpoint, port, monkeypatch
):
    uri = "data:image/png;base64," + base64.b64encode(image.read_bytes()).decode()
    conversations = [[{"role": "user", "content": text}] for text in TEXTS]
    conversations.append(
        [
            {"role": "user", "content": "red"},
            {"role": "assistant", "content": "green"},
            {"role": "user", "content": "blue"},
        ]
    )
    with_image = test_chat.with_image(image, "What colour is this?")
    expected = [test_chat.theirs(folder, one) for one in [*conversations, with_image]]
    block = {"type": "image_url", "image_url": {"url": uri}}
    conversations.append([{"role": "user", "content": [block, with_image[0]["content"][1]]}])
    answers = {}
    decoder = endpoint.decoder
    admitted = decoder._admitted

    def all_together():
        if decoder._rows or len(decoder._waiting) == len(conversations):
            return admitted()
        time.sleep(0.01)
        return []

    monkeypatch.setattr(decoder, "_admitted", all_together)

    def client(index):
        answers[index] = ask(port, conversations[index])

    threads = [threading.Thread(target=client, args=(i,)) for i in range(len(conversations))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    found = [answers[i]["choices"][0]["message"]["content"] for i in range(len(conversations))]
    assert found == expected
    assert len(set(found)) > 3
    assert decoder.largest_batch == len(conversations)
    (completion,) = complete(
        endpoint.model.engine,
        endpoint.model.prompt(with_image),
        Decoding(NEW, endpoint.model.stop),
    )
    assert answers[5]["choices"][0]["token_ids"] == completion.tokens
    assert answers[5]["prompt_token_ids"] == endpoint.model.prompt(with_image).input_ids.tolist()


def test_endpoint_stream_holds_the_same_text_tokens_and_log_probs_as_the_whole_answer(port):
    options = {"n": 2, "temperature": 0.8, "seed": 7, "logprobs": True, "top_logprobs": 3}
    whole = ask(port, "red", **options)
    stream = post(
        port,
        messages=[{"role": "user", "content": "red"}],
        max_tokens=NEW,
        return_token_ids=True,
        stream=True,
        stream_options={"include_usage": True},
        **options,
    )
    chunks = events(stream)
    assert chunks[-1]["usage"] == whole["usage"]
    assert whole["choices"][0]["token_ids"] != whole["choices"][1]["token_ids"]
    for choice in whole["choices"]:
        own = [
            one["choices"][0]
            for one in chunks[:-1]
            if one["choices"][0]["index"] == choice["index"]
        ]
        text = "".join(one["delta"].get("content") or "" for one in own)
        assert text == choice["message"]["content"]
        assert [token for one in own for token in one.get("token_ids", [])] == choice["token_ids"]
        listed = [one["logprobs"]["content"] for one in own if one.get("logprobs")]
        assert [entry for entries in listed for entry in entries] == choice["logprobs"]["content"]
        assert own[-1]["finish_reason"] == choice["finish_reason"]
        for entry in choice["logprobs"]["content"]:
            values = [one["logprob"] for one in entry["top_logprobs"]]
            assert len(values) == 3
            assert values == sorted(values, reverse=True)
            assert entry["logprob"] <= values[0] + 1e-6


def test_endpoint_sampled_answer_is_that_of_mvp_chat_with_the_same_seed(folder, endpoint, port):
    model = endpoint.model
    messages = [{"role": "user", "content": "blue"}]
    decoding = Decoding(NEW, model.stop, 0.9, top_k=20, top_p=0.95, seed=11, samples=2)
    expected = complete(model.engine, model.prompt(messages), decoding)
    sampling = {"temperature": 0.9, "top_k": 20, "top_p": 0.95, "seed": 11, "n": 2}
    found = ask(port, messages, **sampling)
    assert [one["token_ids"] for one in found["choices"]] == [one.tokens for one in expected]


def test_endpoint_log_probs_are_those_of_the_model_at_temperature_1(endpoint, port):
    found = ask(port, "red", temperature=2.0, seed=1, logprobs=True)
    engine = endpoint.model.engine
    prompt = endpoint.model.prompt([{"role": "user", "content": "red"}])
    (choice,) = found["choices"]
    batch = PackedBatch.from_sequences(
        [torch.cat([prompt.input_ids, torch.tensor(choice["token_ids"])])],
        media=endpoint.model.encoder.media.empty(),
    )
    batch.position_ids = batch.position_ids.expand(3, -1)
    log_probs = engine.infer_batch(batch, ["log_probs"], temperature=1.0)["log_probs"]
    log_probs = log_probs[prompt.num_tokens - 1 : -1]
    values = torch.tensor([one["logprob"] for one in choice["logprobs"]["content"]])
    torch.testing.assert_close(values, log_probs, atol=1e-5, rtol=0)


def test_endpoint_stop_string_ends_the_answer_before_it_and_is_not_streamed(port):
    text = ask(port, "user assistant")["choices"][0]["message"]["content"]
    stop = text[3:5]
    expected = text.partition(stop)[0]
    found = ask(port, "user assistant", stop=[stop])["choices"][0]
    assert found["message"]["content"] == expected
    assert found["finish_reason"] == "stop"
    request = {"messages": [{"role": "user", "content": "user assistant"}], "temperature": 0}
    chunks = events(post(port, **request, max_tokens=NEW, stop=stop, stream=True))
    assert "".join(one["choices"][0]["delta"].get("content") or "" for one in chunks) == expected


def test_endpoint_tag_of_an_image_in_a_text_is_text(endpoint, port):
    found = ask(port, "red <image> blue")
    prompt = endpoint.model.tokenizer.decode(found["prompt_token_ids"])
    assert "red <image> blue" in prompt


def test_endpoint_completions_continue_text_and_token_ids(endpoint, port):
    tokenizer = endpoint.model.tokenizer
    ids = [tokenizer(text)["input_ids"] for text in TEXTS[:2]]
    options = {"max_tokens": 5, "temperature": 0, "return_token_ids": True}
    by_text = json.loads(post(port, "completions", prompt=TEXTS[:2], logprobs=2, **options))
    by_ids = json.loads(post(port, "completions", prompt=ids, logprobs=2, **options))
    assert by_text["choices"] == by_ids["choices"]
    packed = PackedBatch.from_sequences(
        [torch.tensor(one) for one in ids], media=endpoint.model.encoder.media.empty()
    )
    packed.position_ids = packed.position_ids.expand(3, -1)
    expected = complete(endpoint.model.engine, packed, Decoding(5, endpoint.model.stop))
    assert [one["token_ids"] for one in by_ids["choices"]] == [one.tokens for one in expected]
    assert len(by_ids["choices"][1]["logprobs"]["tokens"]) == len(expected[1].tokens)


def test_endpoint_answer_with_a_call_has_it_as_tool_calls(endpoint, port, monkeypatch):
    text = 'Well <tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'
    monkeypatch.setattr(endpoint.model, "text", lambda tokens, stops=None: text)
    prompt = endpoint.model.prompt  # this template writes no tools
    monkeypatch.setattr(endpoint.model, "prompt", lambda messages, tools: prompt(messages))
    tool = {"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}
    (choice,) = ask(port, "red", tools=[tool])["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Well"
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"x": 1}'}
    request = {"messages": [{"role": "user", "content": "red"}], "max_tokens": 4}
    chunks = events(post(port, **request, tools=[tool], stream=True))
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    assert chunks[-1]["choices"][0]["delta"]["tool_calls"][0]["index"] == 0
    (choice,) = ask(port, "red", tools=[tool], tool_choice="none")["choices"]
    assert "tool_calls" not in choice["message"]


USER = [{"role": "user", "content": "red"}]
FILE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "/etc/passwd"}}]}]
BROKEN = "data:image/png;base64,AAAA"
NO_IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": BROKEN}}]}]


@pytest.mark.parametrize(
    "request_, message",
    [
        ({"data": b"{"}, "no JSON"),
        ({"data": b"[1]"}, "no JSON object"),
        ({"messages": []}, "list of messages"),
        ({"messages": [{"role": "x", "content": "y"}]}, "roles are"),
        ({"messages": ["red"]}, "messages\\[0\\]"),
        ({"messages": FILE}, "data URI"),
        ({"messages": NO_IMAGE}, "image"),
        ({"messages": USER, "max_tokens": 0}, "max_tokens=0: must be an integer"),
        ({"messages": USER, "temperature": "hot"}, "temperature='hot': must be a number"),
        ({"messages": USER, "n": 9}, "n=9"),
        ({"messages": USER, "logit_bias": {"3": 4}}, "logit_bias=.* is not supported"),
        ({"messages": USER, "max_token": 3}, "unknown parameter max_token"),
        ({"messages": USER, "stop": 3}, "stop must be"),
        ({"messages": USER, "top_logprobs": 3}, "needs logprobs=true"),
        ({"messages": USER, "tools": {"f": 1}}, "tools must be a list"),
        ({"messages": USER, "max_tokens": 10**8}, "context of this model"),
    ],
)
def test_endpoint_malformed_request_gets_an_error_of_openai_s_shape(port, request_, message):
    status, error = refused(port, **request_)
    assert status == 400
    assert re.search(message, error["message"])
    assert set(error) == {"message", "type", "param", "code"}
    assert ask(port, "red")["choices"][0]["finish_reason"]  # the server goes on


def test_endpoint_unknown_model_route_and_too_long_prompt_are_named(endpoint, port):
    assert refused(port, messages=USER, model="other")[0] == 404
    assert refused(port, "embeddings", input="x")[0] == 404
    ids = endpoint.model.tokenizer("red")["input_ids"][:1] * (endpoint.context + 1)
    status, error = refused(port, "completions", prompt=ids)
    assert (status, error["code"]) == (400, "context_length_exceeded")
    assert refused(port, "completions", prompt=[10**6])[0] == 400
    placeholder = next(iter(endpoint.placeholders))
    assert "placeholders" in refused(port, "completions", prompt=[placeholder])[1]["message"]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=20) as answer:
        assert answer.status == 200
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=20) as answer:
        assert [one["id"] for one in json.load(answer)["data"]] == ["tiny"]
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request("DELETE", "/v1/models")
    assert json.loads(connection.getresponse().read())["error"]["message"]
    connection.close()


@pytest.mark.parametrize("stream", [True, False])
def test_endpoint_client_that_disconnects_ends_its_request(endpoint, port, monkeypatch, stream):
    monkeypatch.setattr(endpoint.model, "stop", set())
    request = {"messages": USER, "max_tokens": 20_000, "temperature": 0, "stream": stream}
    body = json.dumps(request).encode()
    with socket.create_connection(("127.0.0.1", port), 20) as client:
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        client.sendall(head.encode() + body)
        wait_until(lambda: endpoint.running == 1, 20)
    wait_until(lambda: endpoint.running == 0, 20)
    wait_until(lambda: not endpoint.decoder._rows, 20)


def test_endpoint_forward_that_fails_is_an_error_of_its_requests_alone(endpoint, port, monkeypatch):
    real = BatchedDecoder._forward

    def fails(self, batch, cache):
        if batch.num_tokens > 60:
            raise ValueError("no memory")
        return real(self, batch, cache)

    monkeypatch.setattr(BatchedDecoder, "_forward", fails)
    status, error = refused(port, messages=[{"role": "user", "content": "red " * 60}])
    assert (status, error["message"]) == (500, "ValueError: no memory")
    assert ask(port, "red")["choices"][0]["token_ids"]


@pytest.mark.parametrize("name", ["qwen3_5_text", "mamba", "rwkv"])
def test_decoder_requests_that_join_later_write_the_tokens_that_they_write_alone(name):
    engine = LanguageModelEngine(mixer_model(name), Layout(World.join("cpu")))
    engine.initialize()
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(3, 90, (length,), generator=generator) for length in (7, 1, 12, 5)]
    expected = [
        one.tokens for one in complete(engine, PackedBatch.from_sequences(prompts), Decoding(9))
    ]
    decoder = BatchedDecoder(engine, max_rows=3)
    found = [[] for _ in prompts]
    requests = [Request(PackedBatch.from_sequences([ids]), 9) for ids in prompts]
    try:
        for index, request in enumerate(requests):
            decoder.submit(request)
            if index < 2:  # the next one joins a batch that runs
                found[index] += [request.events.get(timeout=60) for _ in range(2)]
        for index, request in enumerate(requests):
            while not found[index] or found[index][-1].reason is None:
                event = request.events.get(timeout=60)
                assert isinstance(event, Written), event
                found[index].append(event)
    finally:
        decoder.close()
    assert [[one.token for one in row] for row in found] == expected


def test_examples_of_the_docs_work(port, image):
    text = (ROOT / "docs" / "serving.md").read_text()
    blocks = re.findall(r"```bash\n(.*?)```", text, flags=re.DOTALL)
    (curl,) = [block for block in blocks if block.startswith("curl")]
    curl = curl.replace(":8000", f":{port}").replace("photo.png", str(image))
    done = subprocess.run(["bash", "-c", curl], capture_output=True, text=True, timeout=60)
    assert events(done.stdout)[-1]["choices"][0]["finish_reason"], done.stderr
    lines = [line for block in blocks for line in block.splitlines() if line.startswith("mvp ")]
    assert len(lines) > 5
    for line in lines:
        args, rest = build_parser().parse_known_args(shlex.split(line, comments=True)[1:])
        assert args.run in ("tools.serve:serve", "tools.merge:export_command"), line
        assert not rest or args.run == "tools.serve:serve", line


# ---- The command ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_serve_command_is_stopped_by_sigterm_while_a_request_runs(folder, tmp_path):
    log = tmp_path / "log.txt"
    with log.open("w") as out:
        words = ["serve", str(folder), "--port", "0", "--backend", "own"]
        command = [sys.executable, "-m", "mvp_engine.cli", *words]
        process = subprocess.Popen(command, stdout=out, stderr=out)
        try:
            wait_until(lambda: "served at" in log.read_text(), 60)
            port = int(re.search(r":(\d+)/v1", log.read_text())[1])
            assert ask(port, "red")["model"] == folder.name
            with socket.create_connection(("127.0.0.1", port), 20) as client:
                client.sendall(b"POST /v1/chat/completions HTTP/1.1\r\n")  # and nothing more
                process.send_signal(signal.SIGTERM)
                assert process.wait(30) == 0
            assert log.read_text().endswith("stopped\n")
        finally:
            process.kill()
            process.wait()


@pytest.fixture
def fake_python(tmp_path):
    """A python with vLLM and SGLang, of which each start is written down."""
    file = tmp_path / "python"
    file.write_text(
        f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\ncase "$1" in -c) exit 0;; esac\nexit 7\n'
    )
    file.chmod(0o755)
    return file


def test_serve_starts_the_installed_server_with_the_arguments_of_the_model(
    folder, fake_python, tmp_path
):
    words = f"serve {folder} --port 9 --python {fake_python} --tensor-parallel-size 2"
    assert mvp(words) == 7
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls[-1] == (
        f"-m vllm.entrypoints.openai.api_server --model {folder} --host 127.0.0.1 --port 9 "
        f"--served-model-name {folder.name} --tensor-parallel-size 2"
    )
    assert mvp(f"serve {folder} --backend sglang --python {fake_python}") == 7
    assert "-m sglang.launch_server --model-path" in (tmp_path / "calls").read_text()


def test_serve_arguments_for_adapters_and_reward_models(tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen3ForSequenceClassification"]}')
    assert "--runner pooling" in " ".join(vllm_options(tmp_path, None, "m", "h", 1))
    assert "--is-embedding" in sglang_options(tmp_path, None, "m", "h", 1)
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"]}')
    config = tmp_path / "adapter_config.json"
    config.write_text('{"r": 12}')
    words = " ".join(vllm_options(tmp_path, tmp_path, "m", "h", 1))
    assert f"--enable-lora --max-lora-rank 16 --lora-modules m={tmp_path}" in words
    words = " ".join(sglang_options(tmp_path, tmp_path, "m", "h", 1))
    assert f"--enable-lora --lora-paths m={tmp_path}" in words
    config.write_text('{"r": 8, "modules_to_save": ["lm_head"]}')
    with user_error("adapters with modules_to_save: merge it"):
        vllm_options(tmp_path, tmp_path, "m", "h", 1)


def test_serve_user_errors_name_the_fix(folder, fake_python, tmp_path, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        assert mvp(f"serve {folder} --backend own --port {number}") == 2
    assert "cannot listen" in capsys.readouterr().err
    assert mvp(f"serve {folder} --backend own --frob 3") == 2
    assert "--frob 3 is for vLLM or SGLang" in capsys.readouterr().err
    assert mvp(f"serve {folder} --backend vllm") == 2
    assert "pip install vllm" in capsys.readouterr().err
    assert mvp(f"serve {folder} --python {tmp_path}/none") == 2
    assert "give the path of a python" in capsys.readouterr().err
    assert mvp(f"serve {tmp_path}/none") == 2
