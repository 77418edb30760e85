"""Vision-language-action models: pi0 and a chunk regressor."""
