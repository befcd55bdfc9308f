"""Checkpoints: one layout for every strategy and world size, there whole or not at all, and free of pickle."""
