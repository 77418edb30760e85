"""Robot data and action models: LeRobot folders, statistics, normalization, rollouts."""
