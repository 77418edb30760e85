"""A program with a loop of its own that walks along a line by a model behind OPENAI_BASE_URL: `python agent.py 2 7`.

It knows nothing of the training. It prints 1 if the model comes to the goal in time, else 0.
"""

import json
import os
import sys
import urllib.request

SIZE = 10  # places
STEPS = 10
MOVES = {"left": -1, "right": 1}


def main(place: int, goal: int) -> None:
    messages = []
    for _ in range(STEPS):
        messages.append({"role": "user", "content": observation(place, goal)})
        messages.append(ask(messages))
        place = moved(place, messages[-1]["content"])
        if place == goal:
            break
    print(int(place == goal))


def observation(place: int, goal: int) -> str:
    return f"you {place} goal {goal}"


def moved(place: int, answer: str) -> int:
    """The next place. An answer that is no move changes nothing."""
    return min(max(place + MOVES.get(answer, 0), 0), SIZE - 1)


def ask(messages: list[dict[str, str]]) -> dict[str, str]:
    """The model's next message."""
    body = json.dumps({"model": "policy", "messages": messages}).encode()
    url = f"{os.environ['OPENAI_BASE_URL']}/chat/completions"
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as reply:
        message: dict[str, str] = json.load(reply)["choices"][0]["message"]
    return message


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
