"""Metrics of jobs, sampled each second; Prometheus and OTLP. Read ``sampler`` first."""
