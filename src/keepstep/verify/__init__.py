"""`keepstep verify`: kills the workers of a user's own script, and proves that nothing of it came out otherwise."""
