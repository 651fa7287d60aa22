"""Checkpoints: where weights come from, what they are, what of them a token reads."""
