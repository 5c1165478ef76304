"""The trainer and the engine compute the same number."""
