"""What models that act add to the core."""

PLUGINS = {"config": {"actions": "mvp_engine.kit.actions.settings:ActionConfig"}}
