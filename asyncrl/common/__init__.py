"""The vocabulary of a run that every package may use: versions of the weights, roles, states, and names of actors."""
