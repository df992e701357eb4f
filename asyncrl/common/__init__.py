"""Modules that every package may use: the vocabulary of a run (versions of the weights, roles, states, names of
actors), and helpers for tasks, threads and imports."""
