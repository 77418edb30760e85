"""`mvp export`: write a checkpoint as a Hugging Face folder, or, of a plain module, as a state dict."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from mvp_engine import stores
from mvp_engine.checkpoint.format import Reader, verify, write_safetensors
from mvp_engine.checkpoint.manager import find_checkpoint
from mvp_engine.checkpoint.state import HF, ema_name, is_weight, read_shared
from mvp_engine.errors import UserError, count
from mvp_engine.files import publish, remove, temporary_path
from mvp_engine.hf.model.packed_model import PackedModel
from mvp_engine.hf.weights.load import SINGLE
from mvp_engine.hf.weights.merge import merge, read_model_info
from mvp_engine.imports import load_spec
from mvp_engine.model_engine.base import ModelSource, engine_class, is_registered
from mvp_engine.runs import trained_run


def export_command(
    checkpoint: str,
    out: str | None,
    name: str | None,
    root: str,
    *,
    adapter: bool,
    verify: str | None,
    python: str | None,
    gguf: str | None,
    llama_cpp: str | None,
    **options: Any,
) -> None:
    """Write a model to the folder `out`, or upload it to the repository `name`: one of them is given.

    `verify` names a library that reads the export; without `out` it is a temporary one.
    """
    of_push = {key: options.pop(key) for key in ("public", "license", "dry_run", "as_json")}
    if python is not None and verify != "vllm":
        raise UserError("mvp export: --python is for --verify vllm: leave it out")
    if llama_cpp is not None and gguf is None:
        raise UserError("mvp export: --llama-cpp is for --gguf: leave it out")
    if name is not None:
        from mvp_engine.tools.push import push

        options |= {"verify": verify, "gguf": gguf}
        given = [
            key for key in ("engine", "base", "dtype", "ema", "verify", "gguf") if options[key]
        ]
        if out is not None or given:
            flags = [*(["OUT"] if out else []), *(f"--{key}" for key in given)]
            raise UserError(
                f"mvp export --push uploads the run's own export: leave {', '.join(flags)} out"
            )
        push(checkpoint, name, root=root, adapter=adapter, **of_push)
        return
    if out is None and verify is None:
        raise UserError("mvp export: give a folder to write (OUT), or --push ORG/NAME")
    as_json = of_push.pop("as_json")
    ignored = [key for key, value in of_push.items() if value]
    if as_json and verify is None:
        ignored.append("json")
    if ignored:
        names = " and ".join(f"--{key.replace('_', '-')}" for key in ignored)
        raise UserError(f"mvp export: {names} without --push: add --push ORG/NAME, or leave it out")
    if out is not None and stores.is_url(out):
        if gguf or verify:
            raise UserError(
                f"mvp export: --gguf and --verify are for a folder of this machine, not for {out}"
            )
        if stores.list_url(out):
            raise UserError(f"{out} exists and is not empty; choose another name, or remove it")
        stores.cache_folder().mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=stores.cache_folder(), prefix=".export") as temporary:
            folder = Path(temporary) / stores.url_name(out)
            write_folder(checkpoint, str(folder), root, adapter=adapter, **options)
            stores.upload_folder(folder, out, "adapter_config.json" if adapter else "config.json")
        print(f"uploaded to {out}")
    elif gguf is not None:
        _export_gguf(checkpoint, out, root, gguf, llama_cpp, adapter or verify, options)
    elif verify is None:
        write_folder(checkpoint, str(out), root, adapter=adapter, **options)
    else:
        from mvp_engine.tools.verify import verify_export

        run = run_of(exported_checkpoint(checkpoint, root))
        with TemporaryDirectory(prefix="mvp_export_") as work:
            folder = Path(out or Path(work) / "export").expanduser().resolve()
            is_quiet = out is None or as_json
            write_folder(checkpoint, str(folder), root, adapter=adapter, quiet=is_quiet, **options)
            verify_export(verify, run, folder, python, as_json)


def _export_gguf(
    checkpoint: str,
    out: str | None,
    root: str,
    kind: str,
    llama_cpp: str | None,
    other: Any,
    options: dict[str, Any],
) -> None:
    from mvp_engine.tools.gguf import find_converter, write_gguf

    if other or out is None:
        raise UserError(
            "mvp export --gguf writes the whole model to OUT: give OUT, and leave --adapter and --verify out"
        )
    converter = find_converter(llama_cpp)
    with TemporaryDirectory(prefix="mvp_export_") as work:
        folder = Path(work) / "model"
        write_folder(checkpoint, str(folder), root, adapter=False, quiet=True, **options)
        found = exported_checkpoint(checkpoint, root)
        files = write_gguf(folder, Path(out).expanduser(), kind, converter, run_of(found).name)
    print(f"{found} is now {' and '.join(map(str, files))}")


def write_folder(
    checkpoint: str,
    out: str,
    root: str,
    *,
    engine: str | None,
    dtype: str | None,
    max_file_gb: float,
    base: str | None,
    adapter: bool,
    ema: bool,
    quiet: bool = False,
) -> None:
    """Merge a checkpoint, or the best one of a run (its folder, its id or `latest`), into the folder `out`."""
    folder = exported_checkpoint(checkpoint, root)
    if not 0 < max_file_gb < float("inf"):
        raise UserError(f"--max-file-gb {max_file_gb}: must be a positive size")
    target = Path(out).expanduser().resolve()
    wanted_dtype = getattr(torch, dtype) if dtype else None
    if not (folder / HF).is_dir():
        if adapter or base is not None:
            raise UserError(
                f"{folder} is of a plain module, not of a Hugging Face model: --adapter and --base are not for it. "
                "MLLMModelKit.export_adapter writes the LoRA adapters of a plain module"
            )
        write_state_dict(folder, target, wanted_dtype, ema)
        frozen = len(read_shared(folder).get("external") or ())
        left_out = (
            f", without {count(frozen, 'frozen tensor')} of prepare_model()" if frozen else ""
        )
        print(f"{folder} is now the state dict {target / SINGLE}{left_out}")
        return
    merge(
        folder,
        build_model(folder, engine),
        target,
        dtype=wanted_dtype,
        max_file_bytes=int(max_file_gb * 1e9),
        base=base,
        adapter_only=adapter,
        ema=ema,
    )
    if not quiet:
        print(f"{folder} is now the {'peft' if adapter else 'Hugging Face'} folder {out}")


def exported_checkpoint(checkpoint: str, root: str) -> Path:
    """The checkpoint that `mvp export` means by this name."""
    is_path = Path(checkpoint).exists() or "/" in checkpoint
    return model_checkpoint(
        Path(checkpoint) if is_path else trained_run(checkpoint, Path(root)).dir
    )


def run_of(checkpoint: Path) -> Path:
    """The folder of the run that wrote a checkpoint."""
    for folder in checkpoint.resolve().parents:
        if (folder / "config.yaml").is_file():
            return folder
    raise UserError(f"{checkpoint} is in no run folder: --verify and --gguf need its run")


def write_state_dict(checkpoint: Path, out: Path, dtype: torch.dtype | None, ema: bool) -> None:
    """Write the weights of a plain module's checkpoint into one safetensors file, by their names in the module.

    `dtype`: of floating-point tensors, by default their own. `ema`: averaged weights, where the checkpoint has them.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} exists and is not empty; choose another name, or remove it")
    verify(checkpoint, names=is_weight)
    reader = Reader(checkpoint)
    if ema and not any(name.startswith("optim.") and is_weight(name) for name in reader.entries):
        raise UserError(f"{checkpoint} has no averaged weights: set optim.ema in the training")
    tensors: dict[str, Tensor] = {}
    for entry in reader.entries:
        kind, _, name = entry.partition(".")
        if kind == "model":
            averaged = ema_name(name)
            value = reader.read(averaged if ema and averaged in reader.entries else entry)
            is_cast = dtype is not None and value.is_floating_point()
            tensors[name] = value.to(dtype) if is_cast else value
    temporary = temporary_path(out)
    remove(temporary)
    temporary.mkdir(parents=True)
    write_safetensors(tensors, temporary / SINGLE, {"format": "pt"})
    publish(temporary, out)


def model_checkpoint(path: Path) -> Path:
    """The checkpoint at `path`, or the best one of the run there, else its newest, or that of its policy."""
    checkpoint = find_checkpoint(path, best=True)
    policy = checkpoint / "actor"
    return find_checkpoint(policy) if policy.is_dir() else checkpoint


def build_model(checkpoint: Path, engine: str | None = None) -> PackedModel:
    """The model of a checkpoint, on the meta device.

    `engine` names the file or module that registers the model type, if it has moved since the training.
    """
    info = read_model_info(checkpoint)
    _register(info.model_type, engine or info.engine, checkpoint)
    model = engine_class(info.model_type).build_model(ModelSource(str(checkpoint / HF)))
    assert isinstance(model, PackedModel)
    return model


def _register(model_type: str, spec: str | None, checkpoint: Path) -> None:
    """Import the file or module that registers the model type of a recipe."""
    if is_registered(model_type):
        return
    fix = "Name the file or module that registers it: mvp export --engine FILE"
    if spec is None:
        raise UserError(f"{checkpoint} is of the unknown model type {model_type}. {fix}")
    try:
        load_spec(spec, Path.cwd(), "its engine")
    except UserError as error:
        why = str(error).removesuffix(".")
        raise UserError(f"{checkpoint} is of model type {model_type}: {why}. {fix}") from None
    if not is_registered(model_type):
        raise UserError(
            f"{checkpoint} is of model type {model_type}, which {spec} does not register. {fix}"
        )
