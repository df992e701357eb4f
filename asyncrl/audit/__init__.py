"""The audit of a run: checks, from the files that the run wrote, that every prompt that a generator got has exactly one
fate (such as trained or failed) or is still open, and that steps trained the recorded tokens and made the recorded
weights."""
