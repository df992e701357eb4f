"""Deployments: how Ray, the pools and the run's directory start and end."""
