"""What losses that compare answers or models add to the core."""

SETTINGS = "mvp_engine.kit.preference.settings"
PLUGINS = {
    "config": {
        "preference": f"{SETTINGS}:PreferenceConfig",
        "reward": f"{SETTINGS}:RewardConfig",
        "contrastive": f"{SETTINGS}:ContrastiveConfig",
        "distil": f"{SETTINGS}:DistilConfig",
    }
}
