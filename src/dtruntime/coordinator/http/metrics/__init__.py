"""What is measured each second, and its time series. Read ``sampler`` first."""
