"""The Lightning side: the data module, evaluation, checkpoints and callbacks."""
