"""The configuration: the schema, the loading of files and overrides, and the rules over several fields."""
