"""Reinforcement learning by one controller: prompts, rollouts, rewards, advantages, updates."""
