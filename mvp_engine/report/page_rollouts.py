"""Rollouts on the report page: each prompt with its completions and their rewards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape

from mvp_engine.log.format import number
from mvp_engine.report.page_media import media_item

MAX_CHARACTERS = 2000  # of a completion on the page


@dataclass(frozen=True)
class RolloutText:
    """One completion."""

    text: str
    reward: float | None  # None: it failed
    note: str = ""  # such as the step, or why the completion ended


@dataclass(frozen=True)
class PromptRollouts:
    """A prompt and its completions. `media` returns files as in `Example`; `facts` are other columns of the row."""

    prompt: str
    completions: Sequence[RolloutText]
    media: Callable[[], Sequence[bytes]] = list
    facts: dict[str, str] = field(default_factory=dict)


def rollouts_html(title: str, prompts: Sequence[PromptRollouts]) -> list[str]:
    """A section of cards; empty without prompts."""
    if not prompts:
        return []
    rewards = [one.reward for prompt in prompts for one in prompt.completions]
    known = [reward for reward in rewards if reward is not None]
    scale = (min(known, default=0.0), max(known, default=0.0))
    cards = [_card(prompt, scale) for prompt in prompts]
    return [f"<h2>{escape(title)}</h2>", "<div class=cards>", *cards, "</div>"]


def _card(prompt: PromptRollouts, scale: tuple[float, float]) -> str:
    media = "".join(media_item(data) for data in prompt.media())
    html = f"<div class=media>{media}</div>" if media else ""
    html += f"<dl><dt>prompt<dd>{escape(prompt.prompt)}"
    for name, text in prompt.facts.items():
        html += f"<dt>{escape(name)}<dd>{escape(text)}"
    html += f"</dl><table class=rollouts>{''.join(_row(one, scale) for one in prompt.completions)}</table>"
    return f"<div class=card>{html}</div>"


def _row(one: RolloutText, scale: tuple[float, float]) -> str:
    text = one.text if len(one.text) <= MAX_CHARACTERS else one.text[:MAX_CHARACTERS] + " ..."
    written = escape(text) if text else "<span class=dim>(empty)</span>"
    note = f"<span class=dim>{escape(one.note)}</span>" if one.note else ""
    return (
        f'<tr><td class="reward {_colour(one.reward, scale)}">{number(one.reward)}'
        f"<td class=text>{written} {note}</tr>"
    )


def _colour(reward: float | None, scale: tuple[float, float]) -> str:
    """Green in the upper third of the rewards on the page, red in the lower third."""
    lowest, highest = scale
    if reward is None:
        return "bad"
    if highest == lowest:
        return ""
    place = (reward - lowest) / (highest - lowest)
    return "good" if place >= 2 / 3 else "bad" if place <= 1 / 3 else ""
