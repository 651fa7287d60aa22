"""From runs to verdicts: statistics, the decision rule, claims."""
