"""What the Megatron-Core backend adds to the core."""

ENGINES = "mvp_engine.model_engine.megatron.engine"
PLUGINS = {
    "model_engine": {
        "language_model.megatron": f"{ENGINES}:MegatronLanguageModelEngine",
        "value_model.megatron": f"{ENGINES}:MegatronValueModelEngine",
    },
}
