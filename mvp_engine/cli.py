"""`mvp`: the command line, one call into the package per command. The parser is in `tools/argument_parser.py`.

Heavy imports stay inside the commands, so that `mvp --help` imports neither torch nor pydantic.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from mvp_engine.errors import EXIT_USER_ERROR, UserError
from mvp_engine.process.pipes import ignore_broken_pipes
from mvp_engine.process.signals import EXIT_AT_ONCE
from mvp_engine.tools.argument_parser import build_parser
from mvp_engine.tools.nodes import nodes_of


def main(argv: list[str] | None = None) -> int:
    ignore_broken_pipes()
    parser = build_parser()
    if not (sys.argv[1:] if argv is None else argv):
        parser.print_help()
        return EXIT_USER_ERROR
    args, rest = parser.parse_known_args(argv)
    # argparse stops collecting key=value words at the first option after them; here they may stand anywhere.
    if not hasattr(args, "overrides") or any(word.startswith("-") for word in rest):
        if rest:
            args.parser.error(f"unrecognized arguments: {' '.join(rest)}")
    else:
        args.overrides += rest
    try:
        return int(globals()[args.run](args) or 0)
    except UserError as error:
        print(f"mvp: error: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:  # of a command that has nothing to save
        print("mvp: interrupted", file=sys.stderr)
        return EXIT_AT_ONCE


def train(args: argparse.Namespace) -> int:
    from mvp_engine.tools import config, launcher

    device = config.read_config(args.config, args.overrides).device
    return launcher.train(args.config, args.overrides, nodes_of(args), device=device)


def evaluate(args: argparse.Namespace) -> int:
    from mvp_engine.tools import config, launcher

    file, overrides = config.config_or_run(args.config, args.overrides, Path(args.dir))
    device = config.read_config(file, overrides).device
    return launcher.evaluate(file, overrides, nodes_of(args), device=device)


def check(args: argparse.Namespace) -> int:
    from mvp_engine.tools import launcher

    return launcher.check(args.config, args.overrides, nodes_of(args), as_json=args.json)


def profile(args: argparse.Namespace) -> int:
    from mvp_engine.tools import config, launcher

    if args.step is not None:
        return launcher.profile_run(
            args.config, args.overrides, args.nproc, out=args.out, step=args.step
        )
    device = config.read_config(args.config, args.overrides).device
    return launcher.profile(
        args.config,
        args.overrides,
        nodes_of(args),
        device=device,
        out=args.out,
        steps=args.steps,
        first=args.first,
    )


def launch_slurm(args: argparse.Namespace) -> None:
    from mvp_engine.tools import slurm

    job = slurm.SlurmJob(args.nodes, args.gpus, args.cpus, args.time, args.grace, args.sbatch)
    slurm.print_script(args.config, args.overrides, job)


def doctor(args: argparse.Namespace) -> int:
    from mvp_engine.tools.doctor import doctor

    if args.config is not None:
        from mvp_engine.tools import config

        config.read_config(args.config, args.overrides)
    nodes = nodes_of(args)
    return doctor(
        args.config, args.overrides, nodes, args.nproc, folder=args.dir, as_json=args.json
    )


def replay(args: argparse.Namespace) -> int:
    from mvp_engine.tools import replay

    return replay.replay(args.name, args.overrides, args.dir, args.step, args.nproc, args.json)


def plan(args: argparse.Namespace) -> int:
    from dataclasses import fields

    from mvp_engine.kit.plan.planner import Question
    from mvp_engine.tools.plan import print_plan

    question = Question(**{field.name: getattr(args, field.name) for field in fields(Question)})
    return print_plan(question, as_json=args.json)


def models(args: argparse.Namespace) -> None:
    from mvp_engine.tools import models

    models.print_models(args.name, as_json=args.json)


def recipe_list(args: argparse.Namespace) -> None:
    from mvp_engine.tools import recipe

    recipe.print_recipes(as_json=args.json)


def recipe_new(args: argparse.Namespace) -> None:
    from mvp_engine.tools import recipe

    recipe.create_recipe(args.name, args.origin, args.dir)


def skills_install(args: argparse.Namespace) -> None:
    from mvp_engine.tools import skills

    skills.install_skills(args.dir, args.force)


def config_show(args: argparse.Namespace) -> None:
    from mvp_engine.tools import config

    config.print_config(args.config, args.overrides)


def config_schema(args: argparse.Namespace) -> None:
    from mvp_engine.tools import config

    config.print_schema(args.config, args.overrides)


def config_explain(args: argparse.Namespace) -> None:
    from mvp_engine.tools import config

    config.print_explanation(args.key, args.config)


def config_reference(args: argparse.Namespace) -> None:
    from mvp_engine.tools import config

    config.print_reference(args.config)


def data_inspect(args: argparse.Namespace) -> None:
    from mvp_engine.tools import inspect_command

    inspect_command.print_inspection(
        args.what,
        args.overrides,
        model=args.model,
        split=args.split,
        row=args.row,
        limit=args.limit,
        pack_tokens=args.tokens,
        decode=args.decode,
        strict=args.strict,
        as_json=args.json,
    )


def data_command(args: argparse.Namespace) -> None:
    from mvp_engine.tools import inspect

    inspect.run_data_command(args.command, args.config, args.overrides, as_json=args.json)


def chat(args: argparse.Namespace) -> int:
    from mvp_engine.kit.decoding import Decoding
    from mvp_engine.tools import chat

    kinds = ("image", "video", "audio")
    return chat.chat(
        args.target,
        root=args.dir,
        media=[(kind, file) for kind in kinds for file in getattr(args, kind)],
        prompt=args.prompt,
        system=args.system,
        decoding=Decoding(
            args.max_new_tokens,
            temperature=args.temperature,
            top_k=args.top_k,
            top_p=args.top_p,
            seed=args.seed,
        ),
        stop_strings=args.stop,
        device=args.device,
        as_json=args.json,
        output=chat.output_of(args),
    )


def merge(args: argparse.Namespace) -> None:
    from mvp_engine.tools import merge

    merge.merge_command(
        args.checkpoint,
        args.out,
        engine=args.engine,
        dtype=args.dtype,
        max_file_gb=args.max_file_gb,
        base=args.base,
        adapter=args.adapter,
        ema=args.ema,
    )


def push(args: argparse.Namespace) -> None:
    from mvp_engine.tools import push

    push.push(
        args.name,
        args.repository,
        root=args.dir,
        public=args.public,
        adapter=args.adapter,
        license=args.license,
        dry_run=args.dry_run,
        as_json=args.json,
    )


def runs_list(args: argparse.Namespace) -> None:
    from mvp_engine.tools import runs

    runs.print_runs(Path(args.dir), as_json=args.json)


def runs_show(args: argparse.Namespace) -> None:
    from mvp_engine.tools import runs

    runs.print_run(Path(args.dir), args.name, as_json=args.json)


def runs_plot(args: argparse.Namespace) -> None:
    from mvp_engine.tools import runs

    runs.plot_metric(Path(args.dir), args.names, args.metric, args.out, as_json=args.json)


def runs_diff(args: argparse.Namespace) -> None:
    from mvp_engine.tools import runs

    runs.print_diff(Path(args.dir), *args.names, as_json=args.json)


if __name__ == "__main__":
    sys.exit(main())
