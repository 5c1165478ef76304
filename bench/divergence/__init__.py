"""How far a rollout engine's log-probabilities are from a trainer's, stock and in lockstep."""
