"""`mvp tune`: short trainings of a config with other pack sizes and checkpointing, and the fastest of them."""
