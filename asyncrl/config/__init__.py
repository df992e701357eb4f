"""The configuration: its schema, files and overrides, and the rules over several fields."""
