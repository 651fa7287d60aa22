"""The form of synthetic bytes. Raised whenever they change: the checkpoints get new keys then."""

FORM = 2
