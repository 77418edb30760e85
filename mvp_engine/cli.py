"""`mvp`: the command line. `tools/argument_parser.py` says what the words mean, and which function a command calls.

Heavy imports stay inside the commands, so that `mvp --help` imports neither torch nor pydantic.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from typing import Any

from mvp_engine.errors import EXIT_USER_ERROR, UserError
from mvp_engine.process.signals import EXIT_AT_ONCE
from mvp_engine.process.watchdog import ignore_broken_pipes
from mvp_engine.tools.argument_parser import build_parser, moved_command
from mvp_engine.tools.nodes import nodes_of


def main(argv: list[str] | None = None) -> int:
    ignore_broken_pipes()
    words = sys.argv[1:] if argv is None else argv
    parser = build_parser()
    if not words:
        parser.print_help()
        return EXIT_USER_ERROR
    if new := moved_command(words):
        parser.error(new)
    args, rest = parser.parse_known_args(words)
    # argparse stops collecting key=value words at the first option after them; here they may stand anywhere.
    if not hasattr(args, "overrides") or any(word.startswith("-") for word in rest):
        if rest:
            args.parser.error(f"unrecognized arguments: {' '.join(rest)}")
    else:
        args.overrides += rest
    options = vars(args)
    del options["parser"]
    try:
        return call(**options)
    except UserError as error:
        print(f"mvp: error: {error}", file=sys.stderr)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:  # of a command that has nothing to save
        print("mvp: interrupted", file=sys.stderr)
        return EXIT_AT_ONCE


def call(run: str, **options: Any) -> int:
    """Call `module:function` of the package with the options of the command."""
    module, _, function = run.partition(":")
    found = getattr(importlib.import_module(f"mvp_engine.{module}"), function)
    return int(found(**options) or 0)


def doctor(
    config: str | None, overrides: list[str], *, folder: str | None, as_json: bool, **options: Any
) -> int:
    from mvp_engine.config import compose
    from mvp_engine.tools import doctor

    if config is not None:
        compose(config, overrides)
    nodes, nproc = nodes_of(argparse.Namespace(**options)), options["nproc"]
    request = doctor.Request(config, overrides, folder)
    return doctor.doctor(request, nodes, nproc, as_json=as_json)


def plan(what: str, overrides: list[str], *, as_json: bool, **options: Any) -> int:
    from mvp_engine.kit.plan.planner import Question
    from mvp_engine.tools.plan import print_plan

    return print_plan(Question(what, overrides, **options), as_json=as_json)


def chat(target: str, root: str, **options: Any) -> int:
    from mvp_engine.kit.decoding import Decoding
    from mvp_engine.tools import chat

    names = ("temperature", "top_k", "top_p", "seed")
    decoding = Decoding(options["max_new_tokens"], **{name: options[name] for name in names})
    return chat.chat(
        target,
        root=root,
        media=[(kind, file) for kind in chat.KINDS for file in options[kind]],
        prompt=options["prompt"],
        system=options["system"],
        decoding=decoding,
        stop_strings=options["stop"],
        device=options["device"],
        as_json=options["as_json"],
        output=chat.output_of(options),
    )


if __name__ == "__main__":
    sys.exit(main())
