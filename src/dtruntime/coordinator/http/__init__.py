"""The HTTP side of the coordinator: the API, Prometheus metrics and the dashboard.

It only looks, through `ports.Service`; the one thing that changes something is an action, which
goes through the service's door like any call. What it measures by itself (`sampling`) is soft.
"""
