"""`mvp plan`: memory, time, collectives and hangs of a training on GPUs that need not be present.

`planner.py` answers for a config: formulas over the blocks of the model on the meta device (`costs.py`, `step.py`) in
seconds, and the engine's own step on fake tensors and a fake process group (`simulate.py`) for communication, pipeline
stages and hangs. `choice.py` chooses what a config leaves to `auto` by the same formulas (`kit/auto.py` calls it).
"""
