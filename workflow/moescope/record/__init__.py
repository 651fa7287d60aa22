"""The record: assembled, drawn, rendered, audited, and its history."""
