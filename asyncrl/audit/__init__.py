"""The audit of a run: checks, from what the run wrote, that every prompt was trained exactly once by known weights."""
