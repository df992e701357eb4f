"""The witness: a second, plain path for the numbers of an update. It shares no code with the first path."""
