"""The embedded learner: policy-gradient steps on the model definition that the engine runs."""
