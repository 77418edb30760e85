"""The argument parser of `mvp`."""

from __future__ import annotations

import argparse
import re
from typing import NoReturn

from mvp_engine.errors import did_you_mean


class HintingParser(argparse.ArgumentParser):
    """argparse, with the command or option that was probably meant in its error messages."""

    def error(self, message: str) -> NoReturn:
        wrong = re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message)
        if wrong:
            message += did_you_mean(wrong[1], re.findall(r"[\w-]+", wrong[2]))
        wrong = re.search(r"unrecognized arguments: .*?(--[\w-]+)", message)
        if wrong:
            message += did_you_mean(wrong[1], self._all_options())
        super().error(message)

    def _all_options(self) -> list[str]:
        """The options of this parser and its commands: argparse reports unknown ones at the outermost parser."""
        options = list(self._option_string_actions)
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                for command in action.choices.values():
                    options += command._all_options()
        return options
