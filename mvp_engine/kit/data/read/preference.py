"""Preference pairs: the prompt that the chosen and the rejected conversation share."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from mvp_engine.kit.data.read.messages import ACTION_KEYS
from mvp_engine.kit.data.read.row_types import MEDIA, BadRow, Message, Part, Row
from mvp_engine.kit.data.read.value_checks import check_text


def common_prompt_length(chosen: str, rejected: str) -> int:
    """The length of the prompt that two plain texts begin with, up to their last common whole word."""
    same = len(os.path.commonprefix([chosen, rejected]))  # noqa: RUF071  (by character, as intended)
    return max(chosen.rfind(space, 0, same) for space in " \n\t") + 1


def join_prompt_and_answer(
    prompt: list[Message],
    answer: list[Message],
    key: str,
) -> list[Message]:
    """The whole conversation.

    Some datasets store it in chosen and rejected already, and repeat the prompt in its own column.
    """
    if not prompt or answer[0].role in ("assistant", "tool"):
        return prompt + answer
    questions = [message.text for message in prompt if message.role == "user"]
    if questions and questions[-1] not in [message.text for message in answer]:
        raise BadRow(
            "prompt_mismatch", f"{key} is a whole conversation, but does not contain the prompt"
        )
    return answer


def num_shared_turns(chosen: Sequence[Message], rejected: Sequence[Message]) -> int:
    """How many first turns both conversations share, without the last one: that is the answer."""
    chosen_keys = [_comparison_key(message) for message in chosen]
    rejected_keys = [_comparison_key(message) for message in rejected]
    if _stripped(chosen_keys) == _stripped(rejected_keys) and _same_media(chosen, rejected):
        raise BadRow("equal_pair", "chosen and rejected are the same, but for blanks around them")
    longest = min(len(chosen), len(rejected)) - 1
    shared = 0
    while shared < longest and chosen_keys[shared] == rejected_keys[shared]:
        shared += 1
    return shared


def _comparison_key(message: Message) -> tuple[Any, ...]:
    actions = [message.extra.get(key) for key in ACTION_KEYS]
    return (message.role, message.text, *actions)


def _stripped(keys: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    return [(role, text.strip(), *actions) for role, text, *actions in keys]


def _same_media(chosen: Sequence[Message], rejected: Sequence[Message]) -> bool:
    """Whether two conversations name the same media; of other values than names that is not known."""
    values = []
    for messages in (chosen, rejected):
        parts = [part for message in messages for part in message.parts]
        values.append([part.value for part in parts if part.kind in MEDIA])
    if len(values[0]) != len(values[1]):
        return False
    pairs = zip(*values, strict=True)
    return all(one is other or (isinstance(one, str) and one == other) for one, other in pairs)


def with_rejected_response(row: Row, response: Any) -> Row:
    """A preference pair: the row's last answer is the chosen one, `response` the rejected one."""
    if not row.messages or row.messages[-1].role != "assistant":
        raise BadRow("no_answer", "the row has rejected_response, but does not end with an answer")
    chosen = row.messages[-1]
    rejected = Message("assistant", (Part("text", check_text(response, "rejected_response")),))
    if not rejected.text.strip():
        raise BadRow("no_answer", "rejected_response is empty")
    if _stripped([_comparison_key(chosen)]) == _stripped([_comparison_key(rejected)]):
        raise BadRow(
            "equal_pair",
            "the last answer and rejected_response are the same, but for blanks around them",
        )
    prompt = [replace(message, loss=message.loss or False) for message in row.messages[:-1]]
    return replace(row, messages=(*prompt, chosen), rejected=(*prompt, rejected))
