"""Fill the compile cache for a benchmark of a large model, from a model with the same blocks and few layers.

    PYTHONPATH=. python benchmarks/prime.py text_1.7b --steps 15 [key=value ...]    # a row of recipes.py
    PYTHONPATH=. python benchmarks/prime.py pi0 --tried 24:none:1 --folder robot [key=value ...]
    PYTHONPATH=. python benchmarks/prime.py speech --tried 16384:none:inductor [key=value ...]

Blocks of one kind share their graphs, so three layers compile what thirty need, in a fraction of the memory: several of
these run at once. Keys must be those of the benchmark; rows, `--steps` and `--tried` should be, since graphs are tuned
for the first pack's size. For a row of recipes.py, give the pack size and the activation checkpointing that `auto`
chooses for the large model as keys; its folder and rows are made too. pi0's robot data stay in `--folder`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import actions, recipes, speech

STEPS = 4


def shallow_pi0(tiny: bool, layers: int) -> dict[str, Any]:
    """pi0's default config with few layers. A part that is given replaces its defaults, so all sizes are named."""
    from mvp_engine.hf.model.config_source import read_config

    base: Any = read_config(None, {"model_type": "pi0"})
    names = ("model_type", "hidden_size", "intermediate_size", "num_attention_heads")
    of_text = (*names, "num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings")
    of_vision = (*names, "patch_size", "image_size", "num_channels", "vision_use_head")

    def part(config: Any, keys: tuple[str, ...]) -> dict[str, Any]:
        return {key: getattr(config, key) for key in keys} | {"num_hidden_layers": layers}

    vlm = {key: getattr(base.vlm_config, key) for key in ("model_type", "image_token_id", "projection_dim")}
    vlm["text_config"] = part(base.vlm_config.text_config, of_text)
    vlm["vision_config"] = part(base.vlm_config.vision_config, of_vision)
    return {"model_type": "pi0", "vlm_config": vlm, "dit_config": part(base.dit_config, of_text)}


def prime_pi0(args: argparse.Namespace) -> dict[str, Any]:
    actions.model_config = partial(shallow_pi0, layers=args.layers)
    folder = args.folder or Path("robot")
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "robot").is_dir():
        actions.make(folder, tiny=False, episodes=8, codec=actions.codec_of("libsvtav1"))
    how = argparse.Namespace(tiny=False, workers=12, steps=STEPS, keys=args.keys)
    return actions.ours(folder, how, args.tried.split(":"))


def prime_speech(args: argparse.Namespace) -> dict[str, Any]:
    full = speech.model_config

    def shallow(tiny: bool) -> dict[str, Any]:
        config = full(tiny)
        for part in ("text_config", "code_predictor_config"):
            config["talker_config"][part]["num_hidden_layers"] = args.layers
        return config

    speech.model_config = shallow
    folder = args.folder or Path("speech_shallow")
    speech.make_rows(folder, speech.ROWS, tiny=False)
    how = argparse.Namespace(tiny=False, workers=8, steps=STEPS, limit=600, keys=args.keys)
    return speech.train(folder, how, args.tried)


def prime_recipe(args: argparse.Namespace) -> dict[str, Any]:
    full_shape, full_folder = recipes.shape, recipes.make_folder
    folder = args.folder or Path(tempfile.gettempdir()) / "mvp-recipes"
    how = argparse.Namespace(tiny=args.tiny, steps=args.steps, folder=folder, limit=600, keys=args.keys, warm=True)
    how.profile = how.peers = False
    how.interval = 1
    work, _, data = recipes.prepare(args.what, how)  # what the benchmark itself will use

    def shallow(name: str) -> dict[str, Any]:
        config = full_shape(name)
        config.get("text_config", config)["num_hidden_layers"] = args.layers
        if "vision_config" in config:
            config["vision_config"] |= {"depth": args.layers, "deepstack_visual_indexes": list(range(args.layers))}
        return config

    recipes.shape = shallow
    model = full_folder(work.shape, work.longest, folder / f"{args.layers}_layers")
    how.steps = STEPS
    with tempfile.TemporaryDirectory(prefix="mvp-prime-") as scratch:
        return recipes.ours(work, model, data, how, Path(scratch))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["pi0", "speech", *recipes.WORKS])
    parser.add_argument("keys", nargs="*", metavar="key=value")
    parser.add_argument("--tried", default="24:none:1", help="of actions.py or speech.py")
    parser.add_argument("--steps", type=int, default=40, help="of recipes.py: it decides how many rows there are")
    parser.add_argument("--layers", type=int, default=3, help="of the shallow model")
    parser.add_argument("--tiny", action="store_true", help="of a row of recipes.py: a small shape, for a CPU")
    parser.add_argument("--folder", type=Path, help="of robot data, or of recipes.py")
    args = parser.parse_intermixed_args()
    sys.argv = sys.argv[:1]  # benchmarks read it
    found = {"pi0": prime_pi0, "speech": prime_speech}.get(args.what, prime_recipe)(args)
    print(json.dumps(found, indent=2, default=str))
    return 1 if "why" in found else 0


if __name__ == "__main__":
    sys.exit(main())
