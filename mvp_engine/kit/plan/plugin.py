"""What planning adds to the core: the choice of `auto` on a GPU."""

PLUGINS = {"auto": {"gpu": "mvp_engine.kit.plan.choice:choose_for_gpu"}}
