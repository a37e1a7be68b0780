"""What layers receive, and what methods make of it: sketches, memories, projections, permutations."""
