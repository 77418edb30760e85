"""What reinforcement learning adds to the core."""

PLUGINS = {"config": {"rl": "mvp_engine.kit.rl.settings:RLConfig"}}
