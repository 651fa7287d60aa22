"""Runtimes: a pin made into an environment or a binary, and how the controller talks to it."""
