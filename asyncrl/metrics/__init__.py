"""Prometheus metrics: the catalogue, who records them, the endpoint; experiment trackers."""
