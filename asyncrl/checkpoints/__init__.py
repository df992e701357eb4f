"""Checkpoints of a whole run: model, optimizer, buffer and rows at one step."""
