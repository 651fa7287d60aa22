"""Where a token's time goes: raw events, kernels, terms; what adds up and what does not."""
