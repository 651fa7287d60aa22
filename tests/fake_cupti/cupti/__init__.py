"""CUPTI without a GPU, for the plumbing around it: the real bindings' names, records by rule."""
