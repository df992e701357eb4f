"""Prometheus metrics: the catalogue, the recorders, the endpoint and its discovery; and the experiment trackers."""
