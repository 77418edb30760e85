"""Audio in an assistant's turn: a target, the sound that the model learns to speak. It is no input.

So it is taken out of the turn's content, which the chat template renders. The thinker reads and learns the text alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mvp_engine.errors import count
from mvp_engine.kit.data.read.row_types import BadRow, Message, SpeechCodes


def take_speech(messages: Sequence[Message], is_target: bool) -> list[Message]:
    """The messages with the audio of assistant turns as their `speech`; a bad row unless audio `is_target`."""
    found = []
    for index, message in enumerate(messages):
        if message.role == "assistant":
            message = _with_speech(message, index, is_target)
        elif any(isinstance(part.value, SpeechCodes) for part in message.parts):
            raise BadRow(
                "bad_media",
                f"message {index} ({message.role}) has codes, which only an assistant speaks: give its audio",
            )
        found.append(message)
    return found


def _with_speech(message: Message, index: int, is_target: bool) -> Message:
    audio = [part for part in message.parts if part.kind == "audio"]
    if not audio:
        return message
    if not is_target:
        raise BadRow(
            "speech_target",
            f"message {index} (assistant) has audio, which the model would have to speak: train with "
            "model.type=omni_model and set mllm.speech; or remove the audio; or, if it is an input, move it into "
            "a user's turn",
        )
    if len(audio) > 1:
        raise BadRow(
            "speech_count",
            f"message {index} (assistant) has {count(len(audio), 'sound')}; a turn speaks one: join them, or split "
            "the turn",
        )
    if not message.text.strip():
        raise BadRow(
            "speech_text",
            f"message {index} (assistant) has a sound, but no text: the talker reads the text that it speaks",
        )
    others = tuple(part for part in message.parts if part.kind != "audio")
    return replace(message, parts=others, speech=audio[0])
