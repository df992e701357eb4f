"""The audit of a run: checks, from the files that the run wrote, that every issued prompt has exactly one fate, and
that steps trained the recorded tokens and made the recorded weights."""
