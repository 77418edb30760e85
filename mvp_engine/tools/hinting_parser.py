"""The parser class of `mvp`: help texts with examples, error messages with what was probably meant."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from typing import Any, NoReturn

from mvp_engine.errors import EXIT_USER_ERROR, did_you_mean
from mvp_engine.tools.help_examples import EXAMPLES


class HintingParser(argparse.ArgumentParser):
    """argparse, with examples in its help, and what was probably meant in its error messages."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, formatter_class=argparse.RawDescriptionHelpFormatter)
        self.epilog = EXAMPLES.get(self.prog)

    def error(self, message: str) -> NoReturn:
        if message.endswith("required: COMMAND"):
            self.print_help(sys.stderr)
            self.exit(EXIT_USER_ERROR)
        wrong = re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message)
        if wrong:
            message += did_you_mean(wrong[1], re.findall(r"[\w-]+", wrong[2]))
        wrong = re.search(r"unrecognized arguments: .*?(--[\w.-]+)", message)
        if wrong:
            message += f".{self._option_hint(wrong[1])}"
        super().error(message)

    def _option_hint(self, word: str) -> str:
        """The option that was probably meant, or the config key: people write `--learning_rate 1e-5`."""
        options = list(self._option_string_actions)
        similar = difflib.get_close_matches(word, options, 1, cutoff=0.8)
        if similar or all(action.dest != "overrides" for action in self._actions):
            return did_you_mean(word, similar or options)
        if word == "--config":
            return " Write the file without --config."
        from mvp_engine.config.explain import suggest_key
        from mvp_engine.kit.settings import MLLMConfig

        key = suggest_key(word.lstrip("-").replace("-", "_"), MLLMConfig)
        fix = "" if key.startswith("Known keys") else f" {key}"
        return f" Config keys are written as key=value, without dashes.{fix}"
