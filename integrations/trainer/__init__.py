"""The asynchronous trainer: rollout engines and a learner around one model definition."""
