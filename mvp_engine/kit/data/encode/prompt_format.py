"""PromptFormat: what a processor adds to the text of a prompt that has media (PaliGemma).

Such a processor gets a prompt with placeholders and an answer. It writes a text behind the last placeholder and another
one at the end of the prompt, so neither belongs to the expansion of an item. It comes without a chat template: here is
one that writes the same text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

PROBE = "x"  # a prompt


@dataclass(frozen=True)
class PromptFormat:
    """The texts around the prompt."""

    before: str  # behind the last placeholder
    after: str  # at the end

    @classmethod
    def find(
        cls, alone: Sequence[str], together: Sequence[str], prompt: str
    ) -> PromptFormat | None:
        """From the texts of two items, of both in one text, and of the first item followed by PROBE.

        None: the processor does something else to its text.
        """
        expansion, last = together
        if not prompt.startswith(expansion) or PROBE not in prompt[len(expansion) :]:
            return None
        before, _, after = prompt[len(expansion) :].partition(PROBE)
        found = cls(before, after)
        added = before + after
        return found if [*alone] == [expansion + added, last] and last.endswith(added) else None

    def strip(self, text: str) -> str:
        """The text without what was added to it."""
        start, _, end = text.removesuffix(self.after).rpartition(self.before)
        return start + end

    def chat_template(self, placeholder: str) -> str:
        """For one prompt and its answer: placeholders, the prompt, the answer and the end token."""
        texts = [repr(text) for text in (placeholder, self.before, self.after)]
        return (
            TEMPLATE.replace("PLACEHOLDER", texts[0])
            .replace("BEFORE", texts[1])
            .replace("AFTER", texts[2])
        )


TEMPLATE = """\
{%- if messages | length > 2 or messages[0].role != 'user' %}
{{- raise_exception('this model has one prompt and one answer: a user message, and one of the assistant') }}
{%- endif %}
{%- for message in messages %}
{%- set content = message.content %}
{%- set parts = [{'type': 'text', 'text': content}] if content is string else content %}
{%- if message.role == 'assistant' %}
{%- generation %}{%- for part in parts %}{{- part.text }}{%- endfor %}{{- eos_token }}{%- endgeneration %}
{%- else %}
{%- for part in parts if part.type != 'text' %}{{- PLACEHOLDER }}{%- endfor %}{{- BEFORE }}
{%- for part in parts if part.type == 'text' %}{{- part.text }}{%- endfor %}{{- AFTER }}
{%- endif %}
{%- endfor %}"""
