"""Layer inputs, and what methods compute from them: sketches, memories, projections, permutations."""
