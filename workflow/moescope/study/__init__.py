"""The study: what is asked, with what, and which results are still missing."""
