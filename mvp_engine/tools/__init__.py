"""The commands behind `mvp`: check, estimate, profile, inspect, recipes and runs."""
