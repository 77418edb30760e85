"""The same task by a program with a loop of its own, which knows only the address of the policy."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from mvp_engine.kit.rl import Chat

from .agent_engine_settings import AgentConfig
from .engine import GridEngine

AGENT = Path(__file__).with_name("agent.py")


class AgentEngine(GridEngine):
    config_class = AgentConfig

    def episode(self, row: dict[str, Any], chat: Chat) -> dict[str, float]:
        """1 if the program says that it came to the goal: each of its requests is a turn."""
        program = [sys.executable, str(AGENT), str(row["seed"])]
        environment = {**os.environ, "OPENAI_BASE_URL": chat.url}
        done = subprocess.run(program, env=environment, capture_output=True, text=True, check=True)
        return {"goal": float(done.stdout)}
