"""The task of recipes/agent_rl with its loop in the engine: what the program does, without a program."""

from conftest import ROOT

from mvp_engine.config.engine_class import find_engine
from mvp_engine.imports import import_file

agent = import_file(ROOT / "recipes/agent_rl/agent.py")
(AgentEngine, _) = find_engine("agent_rl", ROOT)


class LoopEngine(AgentEngine):
    def episode(self, row, chat):
        place, goal = row["place"], row["goal"]
        for step in range(agent.STEPS):
            if step:
                chat.user(agent.observation(place, goal))
            place = agent.moved(place, chat.answer().text)
            if place == goal:
                break
        return {"goal": float(place == goal)}
