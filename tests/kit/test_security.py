"""Real attempts to run code, or to read files outside, by what others made: checkpoints, models, datasets, recipes.

Each payload would create `marker`, or shows `SECRET`, if it worked. docs/security.md says what is trusted.
"""

import io
import json
import os
import pickle
import resource
import shutil
import subprocess
import sys
import tarfile
from functools import partial

import pytest
import torch
from conftest import TINY, user_error
from run_files import read_json, write_json
from safetensors.torch import save_file
from templates.tiny import tokenizer
from tiny_vlm import chat, made, qwen3_vl, write, write_image
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from mvp_engine.checkpoint import CorruptCheckpoint, state
from mvp_engine.checkpoint import format as checkpoint_format
from mvp_engine.config import compose
from mvp_engine.errors import EXIT_USER_ERROR, UserError
from mvp_engine.hf.model.config_source import _config_of_folder
from mvp_engine.hf.weights.export import Target, write_side_files
from mvp_engine.hf.weights.load import weight_paths
from mvp_engine.kit.data.encode import template_marks
from mvp_engine.kit.data.encode.processor import load_processor
from mvp_engine.kit.data.encode.template import ChatTemplate
from mvp_engine.kit.data.encode.template_marks import RowMarks
from mvp_engine.kit.data.read.row_types import BadRow
from mvp_engine.kit.data.read.rows import read_row
from mvp_engine.kit.data.read.sources import open_source
from mvp_engine.model_engine import LanguageModelEngine, ModelSource
from mvp_engine.runs import list_runs
from mvp_engine.tools.recipe import new_recipe

SECRET = "the private key"


class Payload:
    """Runs code when it is unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


@pytest.fixture
def marker(tmp_path):
    file = tmp_path / "marker"
    yield file
    assert not file.exists(), "the payload ran"


@pytest.fixture
def secret(tmp_path):
    file = tmp_path / "outside" / "id_rsa"
    file.parent.mkdir()
    file.write_text(SECRET)
    return file


# ---- Checkpoints ----------------------------------------------------------------------------------------------------


def test_payload_itself_would_run(tmp_path):
    pickle.loads(pickle.dumps(Payload(tmp_path / "ran")))
    assert (tmp_path / "ran").exists()


def pickled(payload):
    """The bytes of a pickle, as older checkpoints held them."""
    buffer = io.BytesIO()
    torch.save(payload, buffer)
    return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)


def write_checkpoint(folder, **tensors):
    checkpoint_format.write(folder, checkpoint_format.shards_of(tensors), None)


@pytest.mark.parametrize("place", ["shared", "rank.00000"])
def test_checkpoint_with_a_pickle_payload_is_refused(train, tmp_path, marker, place, capsys):
    """The checksums are right: whoever made it computed them."""
    assert train("train.max_steps=3", dir=tmp_path / "runs") == 0
    folder = list_runs(tmp_path / "runs")[0].checkpoint_list()[-1]
    reader = checkpoint_format.Reader(folder)
    tensors = {name: reader.read(name) for name in reader.entries}
    tensors[place] = pickled({"step": 3, "bad": Payload(marker)})
    write_checkpoint(tmp_path / "made", **tensors)
    checkpoint_format.publish(tmp_path / "made", folder, {"world_size": 1, "step": 3})
    assert train("resume=auto train.max_steps=6", dir=tmp_path / "runs") == EXIT_USER_ERROR
    assert "is not loaded, since that could run code" in capsys.readouterr().err


def test_checkpoint_with_links_or_names_outside_is_refused(tmp_path, secret):
    folder = tmp_path / "step"
    write_checkpoint(folder, x=torch.ones(3))
    checkpoint_format.verify(folder)
    write_json(folder / "meta.json", {"files": {"../outside/id_rsa": 0}})
    with pytest.raises(CorruptCheckpoint, match="names a file outside"):
        checkpoint_format.verify(folder)
    (folder / "meta.json").write_text("{}")
    (folder / "hf").mkdir()
    (folder / "hf" / "chat_template.jinja").symlink_to(secret)
    with pytest.raises(CorruptCheckpoint, match="is a link to"):
        checkpoint_format.verify(folder)


@pytest.mark.parametrize("dtype", ["torch.load", "torch.ops", "load", "torch.os"])
def test_checkpoint_header_with_a_function_as_dtype_is_refused(tmp_path, dtype):
    header = json.dumps({"x": {"name": "x", "dtype": dtype, "shape": [3], "offset": [0]}})
    file = tmp_path / "rank_00000.safetensors"
    save_file({"x": torch.ones(3)}, file, {"ranks": "1", "pieces": header})
    with pytest.raises(CorruptCheckpoint, match="cannot be read"):
        checkpoint_format.Reader(tmp_path)


def test_checkpoint_read_shared_of_a_payload_is_a_user_error(tmp_path, marker):
    write_checkpoint(tmp_path, shared=pickled(Payload(marker)))
    with user_error("could run code"):
        state.read_shared(tmp_path)


# ---- Models ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["../outside/model.safetensors", "/etc/passwd", "a/../../outside/x.safetensors"]
)
def test_weight_index_that_names_a_file_outside_is_refused(tmp_path, name):
    write_json(tmp_path / "model.safetensors.index.json", {"weight_map": {"a": name}})
    with user_error("a file outside of its folder"):
        weight_paths(tmp_path)


def test_pickled_weights_are_refused(tmp_path, marker):
    torch.save(Payload(marker), tmp_path / "pytorch_model.bin")
    with user_error("is a pickle"):
        weight_paths(tmp_path)


@pytest.fixture
def model_folder(tmp_path):
    folder = tmp_path / "model"
    tokenizer("zephyr").save_pretrained(folder)
    return folder


def with_code(folder, config, marker, auto_map, **settings):
    (folder / "evil.py").write_text(f"import os\nos.system('touch {marker}')\nclass Evil: ...\n")
    file = folder / config
    before = read_json(file) if file.exists() else {}
    write_json(file, {**before, **settings, "auto_map": auto_map})


def test_tokenizer_with_code_of_its_own_runs_none_of_it(model_folder, marker, monkeypatch):
    asked = []
    monkeypatch.setattr("builtins.input", lambda *text: asked.append(str(text)) or "y")
    auto_map = {"AutoTokenizer": ["evil.Evil", "evil.Evil"], "AutoProcessor": "evil.Evil"}
    with_code(model_folder, "tokenizer_config.json", marker, auto_map, tokenizer_class="Evil")
    with_code(model_folder, "processor_config.json", marker, auto_map, processor_class="Evil")
    with user_error("has no processor or tokenizer that transformers can read"):
        load_processor(model_folder)
    assert not asked
    assert "evil" not in sys.modules


def test_model_config_with_code_of_its_own_runs_none_of_it(tmp_path, marker):
    with_code(tmp_path, "config.json", marker, {"AutoConfig": "evil.Evil"}, model_type="evil_lm")
    with user_error("cannot be read"):
        _config_of_folder(tmp_path)


def test_auto_map_of_a_known_model_is_a_warning_and_not_exported(
    model_folder, marker, tmp_path, logged
):
    warned = logged()
    code = dict.fromkeys(("AutoConfig", "AutoModelForCausalLM"), "evil.Evil")
    code["AutoTokenizer"] = ["evil.Evil", None]
    sizes = {"vocab_size": 320, "hidden_size": 8, "head_dim": 8}
    config = Qwen3Config(**sizes, num_hidden_layers=1, num_attention_heads=1)
    Qwen3ForCausalLM(config).save_pretrained(model_folder)
    with_code(model_folder, "config.json", marker, code)
    with_code(model_folder, "tokenizer_config.json", marker, code)
    model = LanguageModelEngine.build_model(ModelSource(str(model_folder)))
    rows = write(tmp_path / "rows.jsonl", [chat("hello", "world")])
    kit = made(rows, load_processor(model_folder))
    assert [text.partition(",")[0] for text in warned] == [
        f"{model_folder}/{name}.json names code of its own (auto_map)"
        for name in ("config", "tokenizer_config")
    ]
    kit.save_processor(tmp_path / "processor")
    for side_files in (model_folder, tmp_path / "processor"):
        model.side_files = side_files
        write_side_files(model.export_target(), tmp_path / "out")
        for file in (tmp_path / "out").glob("*.json"):
            for key in ("auto_map", "is_local", "local_files_only"):
                assert key not in file.read_text(), file
    assert "evil" not in sys.modules
    exported = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert exported.encode("hello") == tokenizer("zephyr").encode("hello")


@pytest.mark.parametrize("value", ["../outside/id_rsa", "/etc/passwd"])
def test_tokenizer_config_that_names_a_file_outside_is_refused(model_folder, secret, value):
    file = model_folder / "tokenizer_config.json"
    write_json(file, {**read_json(file), "vocab_file": value})
    with user_error("is outside of its folder"):
        load_processor(model_folder)


def test_chat_template_that_is_a_link_outside_is_neither_read_nor_exported(model_folder, secret):
    (model_folder / "chat_template.jinja").unlink(missing_ok=True)
    (model_folder / "chat_template.jinja").symlink_to(secret)
    with user_error("is a link to"):
        load_processor(model_folder)
    sizes = {"hidden_size": 8, "head_dim": 8, "vocab_size": 8}
    config = Qwen3Config(**sizes, num_hidden_layers=1, num_attention_heads=1)
    with torch.device("meta"):
        skeleton = Qwen3ForCausalLM(config)
    target = Target.__new__(Target)
    fields = {"skeleton": skeleton, "side_files": model_folder, "dtype": torch.float32}
    for key, value in fields.items():
        object.__setattr__(target, key, value)
    out = model_folder.parent / "export"
    with user_error("which is not copied"):
        write_side_files(target, out)
    assert not any(SECRET in file.read_text() for file in out.rglob("*") if file.is_file())


def test_links_of_the_hub_cache_and_to_files_of_the_same_name_are_read(model_folder, tmp_path):
    snapshot = tmp_path / "models--a--b" / "snapshots" / "abc"
    blobs = tmp_path / "models--a--b" / "blobs"
    linked = tmp_path / "linked"
    for folder in (snapshot, blobs, linked):
        folder.mkdir(parents=True)
    for number, file in enumerate(sorted(model_folder.iterdir())):
        (blobs / f"{number}").write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
        (linked / file.name).symlink_to(file)
    for folder in (snapshot, linked):
        assert load_processor(folder).encode("hello") == tokenizer("zephyr").encode("hello")


ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.system('touch MARKER') }}",
    "{{ lipsum.__globals__['os'].system('touch MARKER') }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__globals__['__builtins__']['__import__']('os').system('touch MARKER') }}",
    "{{ mvp_mark.__globals__ }}{{ mvp_mark.__closure__ }}",
    "{{ messages.__class__.__base__.__subclasses__() }}",
    "{{ '{0.__class__.__init__.__globals__}'.format(namespace) }}",
    "{{ ('{0.__class__.__mro__}' | attr('format'))(messages) }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ self.__init__.__globals__ }}",
    "{{ messages | attr('__class__') | attr('__mro__') }}",
    "{% for m in messages %}{{ m.update({'content': 'x'}) }}{% endfor %}",
    "{% include '/etc/passwd' %}",
    "{% import '/etc/passwd' as x %}",
    "{{ messages | map('__class__') | list }}",
    "{% set x = messages.append({'role': 'user'}) %}",
]


@pytest.mark.parametrize("template", ESCAPES)
def test_chat_template_that_tries_to_escape_does_nothing(tmp_path, marker, template):
    turns = "{% for m in messages %}{{ m['content'] }}{% endfor %}</s>"
    evil = template.replace("MARKER", str(marker)) + turns
    row = chat("hello", "world")
    try:
        kit = made(write(tmp_path / "rows.jsonl", [row]), tokenizer("zephyr", chat_template=evil))
        encoded = kit.row_encoder.encode(row, None, tmp_path)
        text = kit.processor.decode(encoded[0].ids)
    except (UserError, BadRow):
        return
    for leaked in ("<class", "<module", "<function", "<built-in", "builtins", "root:"):
        assert leaked not in text


CHILDREN = resource.RUSAGE_CHILDREN
LOOPS = "{% for a in range(99999) %}{% for b, c in {1: 2} | items %}{% endfor %}{% endfor %}"
EXPENSIVE = {
    "{{ 'a' * 20000000000 }}": "takes more than 512 MiB",
    "{{ 'a' | center(20000000000) }}": "takes more than 512 MiB",
    "{{ '%20000000000d' % 1 }}": "takes more than 512 MiB",
    "{% set ns = namespace(s='a') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}": "512 MiB",
    "{{ '%2000000d' % 1 }}": "writes a text that is far longer",
    LOOPS: "loops more than",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}": "loops more than",
    "{{ range(99999) | map('string') | map('indent') | list | length * 99 }}"
    * 99: "seconds of CPU time",
    "{% if mvp_mark is not defined %}{{ 'a' * 20000000000 }}{% endif %}": "mvp_mark is a name that templates",
}


@pytest.mark.parametrize("template", EXPENSIVE)
def test_chat_template_that_takes_too_much_memory_or_time_is_refused(template, monkeypatch):
    monkeypatch.setattr(template_marks, "TRIAL_CPU_SECONDS", 1)
    source = template + "{% for m in messages %}{{ m['content'] }}{% endfor %}</s>"
    # In KiB. A forked child begins with the memory of this process.
    before = max(resource.getrusage(who).ru_maxrss for who in (CHILDREN, resource.RUSAGE_SELF))
    with user_error(EXPENSIVE[template]):
        ChatTemplate(tokenizer("zephyr", chat_template=source))
    assert resource.getrusage(CHILDREN).ru_maxrss <= before + 2**20


def test_chat_template_trial_imports_no_torch_and_runs_once_for_a_template(
    monkeypatch,
):
    real = subprocess.run
    programs = []

    def run(command, **options):
        programs.append(command[2])
        command[2] += "\nassert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
        return real(command, **options)

    monkeypatch.setattr(subprocess, "run", run)
    source = "{% for m in messages %}{{ m['content'] }}{% endfor %}</s>{# once #}"
    for _ in range(3):
        ChatTemplate(tokenizer("zephyr", chat_template=source))
    assert len(programs) == 1


def test_row_that_multiplies_its_work_in_a_chat_template_is_a_bad_row(monkeypatch):
    def form(source):
        return ChatTemplate(tokenizer("zephyr", chat_template=source))

    turn = "{% for m in messages %}{{ m['content'] }}</s>{% endfor %}"
    repeats = turn.replace("{{ m", "{{ messages[0]['content'] if m['content'] == 'x' }}{{ m")
    squares = "{% for a in messages %}{% for b in messages %}{% endfor %}{% endfor %}" + turn
    messages = 100 * [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    long = [{"role": "user", "content": "z" * 10**5}, *messages]
    with pytest.raises(BadRow, match="writes a text that is far longer than the row"):
        form(repeats).render(read_row({"messages": long}))
    squared, row = form(squares), read_row({"messages": messages})
    squared.render(row)
    monkeypatch.setattr(template_marks, "RowMarks", partial(RowMarks, max_iterations=1000))
    with pytest.raises(BadRow, match="loops more than 1,000 times"):
        squared.render(row)


# ---- Datasets -------------------------------------------------------------------------------------------------------


HLS = "#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nfile://{}\n#EXT-X-ENDLIST\n"
CONCAT = "ffconcat version 1.0\nfile {}\n"
EPS = (
    "%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(%pipe%touch {}) (w) file\nshowpage\n%%EOF\n"
)


def encode_and_load(encoder, source, index, format):
    sides = encoder.encode(source[index], format, source.root)
    encoder.load(sides, source.root, {"source": 0, "sample": index})


def reasons(file, **settings):
    """Why each row of a file is bad."""
    kit = made(file, qwen3_vl(), **settings)
    source = open_source(file)
    found = []
    for index in range(len(source)):
        with pytest.raises(BadRow) as error:
            encode_and_load(kit.row_encoder, source, index, kit.row_formats()[0])
        assert SECRET not in str(error.value)
        found.append(error.value.reason)
    return found


@pytest.mark.parametrize("whose", ["of the Hub", "refused", "local"])
def test_dataset_row_that_names_files_outside_is_bad(tmp_path, secret, marker, whose):
    """In local files, such paths are read: what is there is decoded as an image, and a private key is none."""
    data = tmp_path / ("datasets--org--name/snapshots/abc" if whose == "of the Hub" else "data")
    data.mkdir(parents=True)
    (data / "link.png").symlink_to(secret)
    os.mkfifo(data / "pipe.png")
    escape, corrupt, unsupported = "path_escape", "corrupt", "unsupported"
    expected = {  # of the Hub, refused, local
        "../outside/id_rsa": (escape, escape, corrupt),
        str(secret): (escape, escape, corrupt),
        f"file://{secret}": (escape, escape, corrupt),
        "link.png": (corrupt, escape, corrupt),
        "../" * 40 + "etc/passwd": (escape, escape, corrupt),
        "pipe.png": (unsupported, unsupported, unsupported),
        "/dev/zero": (escape, escape, unsupported),
        "http://127.0.0.1/x.png": (unsupported, unsupported, unsupported),
    }
    rows = [chat([{"type": "image", "image": value}], "Yes.") for value in expected]
    settings = {"limits": {"allow_outside": False}} if whose == "refused" else {}
    column = ["of the Hub", "refused", "local"].index(whose)
    found = reasons(write(data / "rows.jsonl", rows), **settings)
    assert found == [row[column] for row in expected.values()]


def test_image_of_a_local_file_by_absolute_path_is_read(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "photos").mkdir()
    name = write_image(tmp_path / "photos" / "a.png", 16, 16)
    rows = [chat("<image>?", "Yes.") | {"image": f"{tmp_path}/photos/{name}"}, chat("Hi", "Ho")]
    kit = made(write(tmp_path / "data" / "rows.jsonl", rows), qwen3_vl())
    assert "Bad rows: none" in kit.summary("train")


def test_dataset_media_that_name_other_files_or_programs_are_bad(tmp_path, secret, marker):
    """A playlist is no video, and PostScript is no image: its decoder is a program."""
    pytest.importorskip("av")
    (tmp_path / "list.mp4").write_text(HLS.format(secret))
    (tmp_path / "concat.mp4").write_text(CONCAT.format(secret))
    (tmp_path / "image.png").write_text(EPS.format(marker))
    rows = [chat([{"type": "video", "video": name}], "Yes.") for name in ("list.mp4", "concat.mp4")]
    rows.append(chat([{"type": "image", "image": "image.png"}], "Yes."))
    assert reasons(write(tmp_path / "rows.jsonl", rows)) == ["corrupt"] * 3


def test_dataset_caption_that_is_a_link_outside_is_bad(tmp_path, secret):
    data = tmp_path / "data"
    data.mkdir()
    (data / "one.txt").symlink_to(secret)
    (data / "two.txt").write_text("fine")
    source = open_source(data)
    assert len(source) == 2
    with pytest.raises(BadRow, match="leads out of"):
        source[0]
    assert source[1]["text"] == "fine"


def test_dataset_info_that_names_a_file_outside_is_refused(tmp_path):
    from mvp_engine.kit.data.settings import read_dataset_info

    for name in ("../outside/rows.json", "/etc/passwd"):
        write_json(tmp_path / "dataset_info.json", {"x": {"file_name": name}})
        with user_error("outside of its folder"):
            read_dataset_info(f"{tmp_path}/dataset_info.json:x")


def test_tar_shard_with_pickles_and_links_unpickles_and_reads_nothing(tmp_path, secret, marker):
    file = tmp_path / "shard.tar"
    members = {"a.pyd": pickle.dumps(Payload(marker)), "a.txt": b"fine", "a.npy": b"x"}
    with tarfile.open(file, "w") as tar:
        for name, data in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    assert open_source(file)[0]["text"] == "fine"
    with tarfile.open(file, "w") as tar:
        link = tarfile.TarInfo("b.txt")
        link.type = tarfile.SYMTYPE
        link.linkname = str(secret)
        tar.addfile(link)
    with pytest.raises((UserError, BadRow)) as error:
        open_source(file)[0]
    assert SECRET not in str(error.value)


def test_arrow_file_with_a_pickled_extension_type_runs_nothing(tmp_path, marker):
    pyarrow = pytest.importorskip("pyarrow")
    extension = {"name": b"arrow.py_extension_type", "metadata": pickle.dumps(Payload(marker))}
    metadata = {f"ARROW:extension:{key}": value for key, value in extension.items()}
    field = pyarrow.field("text", pyarrow.string(), metadata=metadata)
    table = pyarrow.table([["fine"]], schema=pyarrow.schema([field]))
    file = str(tmp_path / "rows.arrow")
    with pyarrow.OSFile(file, "wb") as out, pyarrow.ipc.new_file(out, table.schema) as writer:
        writer.write_table(table)
    assert open_source(file)[0]["text"] == "fine"


def test_report_page_shows_hostile_text_as_text():
    from mvp_engine.report.page import _example

    class Hostile:
        question = expected = written = "<script>alert(1)</script><img src=x onerror=alert(1)>"
        right = None
        media = spoken = list

    html = _example(Hostile(), ["question", "expected", "written"])
    assert "<script" not in html
    assert "<img" not in html


# ---- Configs and recipes --------------------------------------------------------------------------------------------


def test_config_with_a_python_tag_is_refused(tmp_path, marker):
    file = tmp_path / "train.yaml"
    project = f"!!python/object/apply:os.system ['touch {marker}']"
    file.write_text(f"engine: {TINY.parent / 'engine.py'}\nproject: {project}\n")
    with pytest.raises(UserError):
        compose(str(file), [])


def test_recipe_with_a_link_outside_is_not_copied(tmp_path, secret):
    recipe = tmp_path / "recipe"
    shutil.copytree(TINY.parent, recipe)
    (recipe / "notes.md").symlink_to(secret)
    with user_error("a link that leads out of the recipe"):
        new_recipe("copied", str(recipe), tmp_path)
    assert not (tmp_path / "copied").exists()
