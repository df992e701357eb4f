"""The witness: computes the numbers of an optimizer update a second time, by plain formulas, to check the learner. It
shares no code with the learner's own computation."""
