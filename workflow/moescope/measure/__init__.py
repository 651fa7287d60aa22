"""Measuring: rounds of arms side by side on a quiet host, and what makes a run valid."""
