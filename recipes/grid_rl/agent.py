"""A program with a loop of its own that walks over the grid by a model behind OPENAI_BASE_URL: `python agent.py SEED`.

It knows nothing of the training. It prints 1 if it comes to the goal, else 0.
"""

import json
import os
import sys
import urllib.request

from world import GridWorld


def main(seed: int) -> None:
    world = GridWorld()
    observation, _ = world.reset(seed)
    messages = []
    is_over = False
    while not is_over:
        messages.append({"role": "user", "content": observation})
        messages.append(ask(messages))
        observation, _, is_there, is_late, _ = world.step(messages[-1]["content"])
        is_over = is_there or is_late
    print(int(is_there))


def ask(messages: list[dict[str, str]]) -> dict[str, str]:
    """The model's next message."""
    body = json.dumps({"model": "policy", "messages": messages}).encode()
    url = f"{os.environ['OPENAI_BASE_URL']}/chat/completions"
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as reply:
        message: dict[str, str] = json.load(reply)["choices"][0]["message"]
    return message


if __name__ == "__main__":
    main(int(sys.argv[1]))
