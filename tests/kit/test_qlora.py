"""QLoRA: adapters on a base in NF4 train like adapters on the dequantized base, on every layout and on disk."""

import pytest
import torch
from conftest import mvp, user_error
from families import config_of, parallel
from folders import entries
from lora_models import BATCH, adam, engine_of, exported, log_probs, steps, token_log_probs, weights
from run_files import read_json
from test_api import constant

from mvp_engine.checkpoint.format import Reader
from mvp_engine.distributed import Layout, World
from mvp_engine.hf import LanguageModel
from mvp_engine.hf.model.model_parts import trained_parts
from mvp_engine.kit import Lora, MLLMModelKit
from mvp_engine.kit.mfu import MFUKit
from mvp_engine.model_engine import FSDPEngine, ModelSource, Settings, engine_class
from mvp_engine.ops import nf4

NF4 = {"llm": "nf4"}
SIZES = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32, "vocab_size": 100}
IDS = torch.arange(3, 12)[None]


def save(folder, dtype=torch.float32):
    torch.manual_seed(0)
    config = config_of("qwen3")
    for name, value in {**SIZES, "num_attention_heads": 4, "num_key_value_heads": 2}.items():
        setattr(config, name, value)
    hf = LanguageModel.from_config(config).hf
    hf.to(dtype).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save(tmp_path_factory.mktemp("base") / "qwen3")


@pytest.fixture(scope="module")
def half(tmp_path_factory):
    return save(tmp_path_factory.mktemp("base") / "half", torch.bfloat16)


@pytest.fixture(scope="module")
def rounded(base, tmp_path_factory):
    """The base with its linear layers, apart from the head, quantized and dequantized."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base)
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            stored = nf4.quantize(module.weight.detach(), torch.float32)
            module.weight.data = nf4.dequantize(stored, module.in_features, torch.float32)
    folder = tmp_path_factory.mktemp("base") / "rounded"
    model.save_pretrained(folder)
    return folder


def same_bytes(a, b):
    """The bytes of quantized weights may be NaN as numbers."""
    return torch.equal(a.detach().view(torch.uint8), b.detach().view(torch.uint8))


def test_qlora_trains_like_lora_on_the_dequantized_base(base, rounded):
    engine = engine_of(base, Lora(rank=4), quantize=NF4)
    plain = engine_of(rounded, Lora(rank=4))
    assert not torch.allclose(
        log_probs(engine), log_probs(engine_of(base, Lora(rank=4))), atol=1e-3
    )
    assert torch.allclose(log_probs(engine), log_probs(plain), atol=1e-5)
    before = weights(engine)
    for one in (engine, plain):
        one.optimizer_zero_grad()
        one.forward_backward_batch(
            [BATCH], lambda b, m=one.model: (m(b, ["loss"])["loss"], b.num_loss_tokens)
        )
    expected = {name: param.grad for name, param in plain.model.named_parameters()}
    for name, param in engine.model.named_parameters():
        grad = expected[name]
        assert (param.grad is None) == (grad is None), name
        if param.grad is not None and grad is not None:
            assert torch.allclose(param.grad, grad, atol=1e-5), name
    steps(engine, count=3)
    changed = {
        name for name, value in weights(engine).items() if not same_bytes(value, before[name])
    }
    assert changed == {name for name in before if ".lora_" in name}
    # Figures count weights, not the bytes that they are stored in.
    assert [part["parameters"] for part in trained_parts(engine.model)] == [
        part["parameters"] for part in trained_parts(plain.model)
    ]
    flops = [float(MFUKit(one.model).flops(BATCH)) for one in (engine, plain)]
    assert flops[0] == flops[1]


def test_qlora_stores_linear_layers_in_4_bits_and_nothing_else(half):
    engine = engine_of(half, Lora(rank=4), quantize=NF4, precision="bf16")
    layers = nf4.quantized_layers(engine.model)
    assert len(layers) == 2 * 7
    for name, param in engine.model.named_parameters():
        if name in layers:
            assert param.nbytes == layers[name].in_features * layers[name].out_features * 9 // 16
        else:
            assert param.dtype == (torch.float32 if ".lora_" in name else torch.bfloat16), name
    assert not any("embed" in name or "head" in name for name in layers)


def train_on(folder, precision, out, sizes, resume):
    """Two steps and a checkpoint, or two steps after that checkpoint."""
    world = World.join("cpu") if sizes else None
    layout = Layout.of(world, parallel(**sizes)) if world else None
    engine = engine_of(folder, Lora(rank=4), layout, quantize=NF4, precision=precision)
    if resume:
        engine.load_checkpoint(out)
    steps(engine, count=2)
    if not resume:
        engine.save_checkpoint(out)
    found = weights(engine)
    if world:
        world.close()
    return found


@pytest.mark.slow
def test_qlora_on_two_shards_equals_one_rank_and_resumes_on_any_layout(
    ranks2, base, half, tmp_path
):
    one = train_on(base, "fp32", tmp_path / "one", {}, False)
    for two in ranks2.run(train_on, base, "fp32", tmp_path / "two", {"shard": 2}, False):
        for name, value in two.items():
            if ".lora_" in name:
                assert torch.allclose(value, one[name], atol=1e-5), name
            else:
                assert same_bytes(value, one[name]), name
    straight = engine_of(base, Lora(rank=4), quantize=NF4)
    steps(straight, count=4)
    again = train_on(base, "fp32", tmp_path / "one", {}, True)
    for name, value in weights(straight).items():
        assert same_bytes(again[name], value), name
    moved = train_on(base, "fp32", tmp_path / "two", {}, True)
    for name in again:
        if ".lora_" in name:
            assert torch.allclose(moved[name], again[name], atol=1e-5), name
    saved = Reader(tmp_path / "two").entries
    assert all(".lora_" in name for name in saved if name.startswith(("model.", "optim.")))
    # In bf16 FSDP2 casts parameters before it gathers them: the stored bytes must arrive as they are.
    expected = train_on(half, "bf16", tmp_path / "half", {}, False)
    for two in ranks2.run(train_on, half, "bf16", tmp_path / "half two", {"shard": 2}, False):
        for name, value in two.items():
            if ".lora_" in name:
                assert torch.allclose(value, expected[name], atol=2e-2), name
            else:
                assert same_bytes(value, expected[name]), name


def test_qlora_exports_merges_and_peft_give_the_logits_of_the_training(base, rounded, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    engine = engine_of(base, Lora(rank=4), quantize=NF4)
    steps(engine, count=3)
    expected = log_probs(engine)[:8]
    engine.save_checkpoint(tmp_path / "saved")
    engine.export_hf(tmp_path / "exported")
    MLLMModelKit.export_adapter(engine, tmp_path / "adapter")
    assert mvp(f"export {tmp_path}/saved {tmp_path}/merged") == 0
    written = exported(tmp_path / "exported")
    for other in (exported(tmp_path / "merged"), dict(engine.get_per_tensor_param())):
        assert written.keys() == other.keys()
        assert all(torch.allclose(written[name], other[name], atol=1e-6) for name in written)
    theirs = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(rounded), str(tmp_path / "adapter")
    )
    for model in (
        AutoModelForCausalLM.from_pretrained(tmp_path / "merged"),
        theirs,
        theirs.merge_and_unload(),
    ):
        logits = model.eval()(IDS).logits
        picked = token_log_probs(logits, IDS)
        assert torch.allclose(picked, expected, atol=1e-5)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_qlora_merge_is_close_to_that_of_peft_on_a_bitsandbytes_base(
    base, half, tmp_path, precision
):
    pytest.importorskip("bitsandbytes")
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    folder = base if precision == "fp32" else half
    engine = engine_of(folder, Lora(rank=4), quantize=NF4, precision=precision)
    steps(engine, count=3)
    engine.export_hf(tmp_path / "exported", torch.float32)
    MLLMModelKit.export_adapter(engine, tmp_path / "adapter")
    in_4_bits = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
    )
    ours = (
        AutoModelForCausalLM.from_pretrained(tmp_path / "exported", dtype=torch.float32)
        .eval()(IDS)
        .logits
    )
    for is_merged in (False, True):
        model = AutoModelForCausalLM.from_pretrained(
            folder, quantization_config=in_4_bits, dtype=torch.float32
        )
        if is_merged:  # peft would quantize the merged weights again
            model = model.dequantize()
        theirs = PeftModel.from_pretrained(model, str(tmp_path / "adapter")).eval()
        theirs = theirs.merge_and_unload() if is_merged else theirs
        bound = 1e-5 if is_merged else 1e-2  # bitsandbytes multiplies in bf16
        assert torch.allclose(theirs(IDS).logits, ours, atol=bound)


def test_qlora_without_a_folder_initializes_saves_and_merges_quantized_weights(
    tmp_path,
):
    changes = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1}
    config = {"model_type": "qwen3", **SIZES, **changes}

    def build(quantize):
        model = MLLMModelKit(Lora(rank=4)).build(ModelSource(None, config))
        engine = engine_class("language_model")(
            model, parallel_alone(), Settings(seed=3, quantize=quantize)
        )
        assert isinstance(engine, FSDPEngine)
        engine.initialize(adam, constant)
        return engine

    engine = build(NF4)
    plain = weights(build({}))
    for name, layer in nf4.quantized_layers(engine.model).items():
        assert same_bytes(layer.weight, nf4.quantize(plain[name], torch.float32)), name
    steps(engine)
    engine.save_checkpoint(tmp_path / "saved")
    again = build(NF4)
    again.load_checkpoint(tmp_path / "saved")
    assert torch.equal(log_probs(again), log_probs(engine))
    engine.export_hf(tmp_path / "exported")
    assert mvp(f"export {tmp_path}/saved {tmp_path}/merged") == 0
    merged = exported(tmp_path / "merged")
    for name, value in entries(tmp_path / "exported" / "model.safetensors"):
        assert torch.allclose(merged[name], value, atol=1e-6), name


def parallel_alone():
    return Layout(World(0, 1, 0, 1, torch.device("cpu")))


def test_quantize_is_refused_where_it_cannot_work(base, tmp_path):
    def fails(match, lora, **settings):
        with user_error(match):
            engine_of(base, lora, train=False, **settings)

    fails(
        r"quantized weights cannot be trained, only adapters on them \(QLoRA\). Set lora.rank=16",
        None,
        quantize=NF4,
    )
    fails("'int3' is no format; known: nf4", Lora(), quantize={"llm": "int3"})
    fails("has no part vision; it has llm", Lora(), quantize={"vision": "nf4"})
    fails("both name llm", Lora(), quantize=NF4, fp8={"llm": True}, precision="bf16")
    narrow = tmp_path / "narrow"
    LanguageModel.from_config(config_of("qwen3")).hf.save_pretrained(narrow)
    with user_error(r"the part llm .* has no frozen linear layers with a multiple of 64 inputs"):
        engine_of(narrow, Lora(), train=False, quantize=NF4)
    engine_of(base, Lora(rank=4), quantize=NF4).save_checkpoint(tmp_path / "saved")
    assert read_json(tmp_path / "saved" / "hf" / "mvp.json")["quantize"] == NF4
    with user_error(r"trained with model.quantize=\{llm: nf4\}, and this model has other base"):
        engine_of(base, Lora(rank=4)).load_checkpoint(tmp_path / "saved")
