"""Graft: a vision encoder and a language model of two folders become one folder, with a new projector between them.

The folder is one of LLaVA's classes in transformers, so from there on it is a model like any other: it trains, shards,
exports, and loads with `from_pretrained`. The weights of both models are copied tensor by tensor, under the names that
the LLaVA class has for them; the projector is new. Nothing here is a table of models: what an encoder returns is found
by running it on the meta device, and what a language model lacks by its names.
"""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mvp_engine.distributed import World
from mvp_engine.errors import UserError
from mvp_engine.hf.model.config_source import read_config
from mvp_engine.hf.model.language_model import config_logit_steps
from mvp_engine.hf.weights.export import Target, export
from mvp_engine.hf.weights.hub import local_folder
from mvp_engine.hf.weights.load import FolderParameter, NewRows, WeightFiles, fingerprint, folder_groups
from mvp_engine.kit import build_once, load_processor

from .settings import Graft

PAD_ROWS = 64  # a vocabulary that grows gets a multiple of it, which tensor parallel and GEMMs divide evenly
# Before the template of the language model: content in parts becomes text, with the image token and a line break in
# the place of each image, as LLaVA writes it.
TEMPLATE = """\
{%- set as_text = namespace(messages=[]) %}
{%- for message in messages %}
{%- if message.content is defined and message.content is iterable and message.content is not string %}
{%- set content = namespace(text='') %}
{%- for part in message.content %}
{%- if part.type == 'image' %}{%- set content.text = content.text + 'IMAGE_TOKEN\\n' %}
{%- elif part.type == 'text' %}{%- set content.text = content.text + part.text %}{%- endif %}
{%- endfor %}
{%- set as_text.messages = as_text.messages + [dict(message, content=content.text)] %}
{%- else %}{%- set as_text.messages = as_text.messages + [message] %}{%- endif %}
{%- endfor %}
{%- set messages = as_text.messages %}
"""


def graft(settings: Graft, model_class: Any = None) -> Path:
    """Writes the folder of the settings if it is missing, and returns it.

    `model_class`: one that you derived from LLaVA's, with a projector of your own; docs/graft.md shows one. All ranks
    may call it: one writes, the others wait.
    """
    folders = {name: local_folder(getattr(settings, name), weights=True) for name in ("vision", "language")}
    for name, folder in folders.items():
        if not (folder / "config.json").is_file():
            raise UserError(f"graft.{name}={getattr(settings, name)} is no folder of a model, nor one of the Hub")
    parameters = settings.model_dump(exclude={"folder"}) | {"version": 1}
    parameters["weights"] = [fingerprint(folder) for folder in folders.values()]
    parameters["class"] = model_class.__name__ if model_class else None
    write = partial(_write, settings, folders["vision"], folders["language"], model_class)
    return build_once(settings.folder, parameters, write, "graft.folder")


def _write(settings: Graft, vision: Path, language: Path, model_class: Any, folder: Path) -> None:
    from transformers import GenerationConfig

    text_model = _language_model(settings, language)
    processor = _Processor(settings, vision, language)
    rows = text_model.config.vocab_size
    if processor.image_token_id >= rows:
        rows = -(-len(processor.tokenizer) // PAD_ROWS) * PAD_ROWS
    vision_config = read_config(vision, {})
    vision_config = getattr(vision_config, "vision_config", vision_config)
    model = _compose(settings, processor, vision_config, text_model.config, rows, model_class)
    processor.count_tokens(model)
    if (language / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(language)

    encoder = model.model.vision_tower
    params = {f"model.vision_tower.{name}": param for name, param in _read(encoder, vision).items()}
    new_rows = NewRows(processor.num_known, {processor.image_token_id: ()} if processor.is_new_token else {})
    embeddings = {text_model.get_input_embeddings(), text_model.get_output_embeddings()}
    in_embeddings = {f"{name}.weight" for name, module in text_model.named_modules() if module in embeddings}
    for name, param in _read(text_model, language).items():
        source = new_rows.extend(param, rows) if name in in_embeddings else param
        params[_grafted_name(text_model, name)] = source
    fresh = _initialize_projector(model, params, settings)

    def fetch(name: str) -> Tensor:
        return fresh[name] if name in fresh else params[name].read(())

    def like(name: str) -> Tensor:
        shape = fresh[name].shape if name in fresh else params[name].shape
        return torch.empty(shape, device="meta")

    names = {name: name for name in model.state_dict()}
    dtype = text_model.config.dtype or torch.float32
    export(Target(model, names, dtype=dtype), folder, fetch, like, World(0, 1, 0, 1, torch.device("cpu")))
    processor.compose(model).save_pretrained(folder)


# ---- The two models ----------------------------------------------------------------------------


def _language_model(settings: Graft, folder: Path) -> Any:
    """The causal language model of a folder, on the meta device."""
    from transformers import AutoModelForCausalLM

    config = read_config(folder, {})
    key = f"graft.language={settings.language}"
    if config.sub_configs or type(config) not in AutoModelForCausalLM._model_mapping:
        raise UserError(f"{key}: {config.model_type} is no model of text alone. Give a causal language model")
    steps = config_logit_steps(config)
    if steps.scale != 1.0 or steps.softcap is not None:
        raise UserError(
            f"{key}: {config.model_type} scales or caps its logits, which LLaVA's class leaves out. Give another "
            "language model, such as one of Llama, Qwen or Mistral"
        )
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def _grafted_name(text_model: Any, name: str) -> str:
    """The LLaVA class' name of a tensor of the language model."""
    prefix = f"{text_model.base_model_prefix}."
    if name.startswith(prefix):
        return f"model.language_model.{name.removeprefix(prefix)}"
    [head] = [name for name, module in text_model.named_modules() if module is text_model.get_output_embeddings()]
    return name.replace(head, "lm_head", 1)


def _compose(
    settings: Graft, processor: "_Processor", vision_config: Any, text_config: Any, rows: int, model_class: Any
) -> Any:
    """The grafted model, on the meta device."""
    import transformers

    default: Any = transformers.LlavaForConditionalGeneration
    if settings.tiles > 1:
        default = transformers.LlavaNextForConditionalGeneration
    model_class = model_class or default
    text_config.vocab_size = rows
    options: dict[str, Any] = {"image_grid_pinpoints": processor.grid} if settings.tiles > 1 else {}
    config = model_class.config_class(
        vision_config=_settings_of(vision_config),
        text_config=_settings_of(text_config),
        image_token_index=processor.image_token_id,
        vision_feature_layer=settings.feature_layer,
        tie_word_embeddings=text_config.tie_word_embeddings,
        **options,
    )
    try:
        with torch.device("meta"):
            return model_class(config)
    except Exception as error:
        kind = getattr(vision_config, "model_type", None)
        raise UserError(
            f"graft.vision={settings.vision}: {kind} is no encoder that {model_class.__name__} can have "
            f"({type(error).__name__}: {error}). Give a model such as SigLIP, CLIP or DINOv2"
        ) from error


def _settings_of(config: Any) -> dict[str, Any]:
    """A config without the path that it was read from."""
    return {name: value for name, value in config.to_dict().items() if name != "_name_or_path"}


def _read(model: Any, folder: Path) -> dict[str, FolderParameter]:
    """The parameters of a model that its folder has, by name."""
    found: dict[str, FolderParameter] = {}
    for group in folder_groups(model, WeightFiles(folder), keep_converted=False):
        found |= group.params
    known = model.state_dict()
    return {name: param for name, param in found.items() if name in known}


def _initialize_projector(model: Any, params: dict[str, FolderParameter], settings: Graft) -> dict[str, Tensor]:
    """New tensors of what neither folder has; by the model's own rule, with a fixed seed."""
    state = model.state_dict(keep_vars=True)
    read = {id(state[name]) for name in params if name in state}  # tied tensors count with each other
    parts = (("vision", "model.vision_tower."), ("language", ("model.language_model.", "lm_head.")))
    missing = [name for name in state if id(state[name]) not in read]
    for key, prefix in parts:
        lacking = [name for name in missing if name.startswith(prefix)]
        if lacking:
            raise UserError(f"graft.{key}={getattr(settings, key)} lacks {lacking[0].removeprefix('model.')}")
        odd = [name for name in params if name.startswith(prefix) and name not in state]
        if odd:
            raise UserError(f"graft.{key}={getattr(settings, key)}: {type(model).__name__} has no {odd[0]}")
    for name, param in params.items():
        if tuple(param.shape) != tuple(state[name].shape):
            shapes = f"{tuple(param.shape)} in the folder and {tuple(state[name].shape)} in its config"
            raise UserError(f"graft: {name.removeprefix('model.')} has the shape {shapes}")
    fresh: dict[str, Tensor] = {}
    with torch.random.fork_rng([]), torch.no_grad():
        torch.manual_seed(0)
        for prefix, module in model.named_modules():
            names = [f"{prefix}.{name}" for name, _ in module.named_parameters(recurse=False)]
            if not set(names) & set(missing):
                continue
            module.to_empty(device="cpu", recurse=False)
            model._init_weights(module)
            fresh |= {name: model.get_parameter(name).detach() for name in names}
    return fresh


# ---- The processor -----------------------------------------------------------------------------


class _Processor:
    """The parts of the grafted model's processor: the encoder's image processor and the language model's tokenizer."""

    def __init__(self, settings: Graft, vision: Path, language: Path) -> None:
        from transformers import AutoImageProcessor

        self.settings = settings
        self.tokenizer = load_processor(language)
        if not hasattr(self.tokenizer, "convert_tokens_to_ids"):
            raise UserError(f"graft.language={settings.language} has a processor, no tokenizer: give a text model")
        if not self.tokenizer.chat_template:
            raise UserError(
                f"graft.language={settings.language}: its tokenizer has no chat template, which says where images go. "
                "Give the instruct model, or save a chat_template with the tokenizer"
            )
        self.num_known = len(self.tokenizer)
        self.is_new_token = settings.image_token not in self.tokenizer.get_vocab()
        self.tokenizer.add_tokens([settings.image_token], special_tokens=True)
        self.image_token_id: int = self.tokenizer.convert_tokens_to_ids(settings.image_token)
        self.tokenizer.chat_template = TEMPLATE.replace("IMAGE_TOKEN", settings.image_token) + self._template()
        try:
            self.images = AutoImageProcessor.from_pretrained(vision, local_files_only=True)
        except (OSError, ValueError) as error:
            raise UserError(f"graft.vision={settings.vision} has no image processor: {error}") from None
        self.pixels = self._pixels()
        if settings.tiles > 1:
            self._use_tiles()

    def _template(self) -> str:
        template = self.tokenizer.chat_template
        return str(template["default"] if isinstance(template, dict) else template)

    def _pixels(self) -> Tensor:
        """The pixel values of one image, on the meta device."""
        from PIL import Image

        encoded = self.images(images=Image.new("RGB", (640, 480)), return_tensors="pt")
        pixels = encoded.get("pixel_values")
        if set(encoded) != {"pixel_values"} or pixels.ndim != 4 or len(pixels) != 1:
            raise UserError(
                f"graft.vision={self.settings.vision}: its image processor returns {', '.join(encoded)} of images in "
                "sizes of their own. LLaVA's classes take encoders with one size of images: SigLIP, CLIP, DINOv2"
            )
        return pixels.to("meta")

    def _use_tiles(self) -> None:
        """LLaVA-NeXT's tiles of the encoder's size: all grids of at most `graft.tiles` of them."""
        from transformers import LlavaNextImageProcessor

        height, width = self.pixels.shape[-2:]
        if height != width:
            raise UserError(f"graft.tiles={self.settings.tiles} needs an encoder of squares, not {height} x {width}")
        sizes = range(1, self.settings.tiles + 1)
        grids = [(i, j) for i in sizes for j in sizes if 1 < i * j <= self.settings.tiles]
        self.grid = [[i * height, j * height] for i, j in grids]
        known = {name: getattr(self.images, name, None) for name in ("image_mean", "image_std", "rescale_factor")}
        self.images = LlavaNextImageProcessor(
            size={"height": height, "width": height},
            crop_size={"height": height, "width": height},
            resample=self.images.resample,
            image_grid_pinpoints=self.grid,
            **{name: value for name, value in known.items() if value is not None},
        )

    def count_tokens(self, model: Any) -> None:
        """Run the encoder and the projector on the meta device: how many tokens does an image become?"""
        config = model.config
        patch_size = getattr(config.vision_config, "patch_size", None)
        if not isinstance(patch_size, int):
            raise UserError(
                f"graft.vision={self.settings.vision}: {config.vision_config.model_type} has no patch_size. LLaVA's "
                "classes take vision transformers: SigLIP, CLIP, DINOv2"
            )
        height, width = self.pixels.shape[-2:]
        self.patch_size = patch_size
        num_patches = (height // patch_size) * (width // patch_size)
        states = self._run(model, lambda: model.model.vision_tower(self.pixels, output_hidden_states=True))
        num_states = states.hidden_states[self.settings.feature_layer].shape[1]
        # The first of more states than patches is the class token, which LLaVA drops; others, registers, stay.
        self.strategy = "full" if num_states == num_patches else "default"
        config.vision_feature_select_strategy = self.strategy
        selected = states.hidden_states[self.settings.feature_layer][:, int(num_states > num_patches) :]
        features = self._run(model, lambda: model.model.multi_modal_projector(selected))
        config.image_seq_length = features.shape[1]
        self.num_additional = features.shape[1] - num_patches + int(self.strategy == "default")

    def _run(self, model: Any, work: Any) -> Any:
        try:
            with torch.no_grad():
                return work()
        except Exception as error:
            kind = model.config.vision_config.model_type
            raise UserError(
                f"graft.vision={self.settings.vision}: {kind} or the projector fails on images of "
                f"{self.pixels.shape[-1]} x {self.pixels.shape[-2]} pixels, as its image processor gives them "
                f"({type(error).__name__}: {error})"
            ) from error

    def compose(self, model: Any) -> Any:
        import transformers

        processor_class = transformers.LlavaNextProcessor if self.settings.tiles > 1 else transformers.LlavaProcessor
        return processor_class(
            self.images,
            self.tokenizer,
            patch_size=self.patch_size,
            vision_feature_select_strategy=self.strategy,
            chat_template=self.tokenizer.chat_template,
            image_token=self.settings.image_token,
            num_additional_image_tokens=self.num_additional,
        )
