"""Where a run's batches come from: numbers of steps, datasets, or what the user iterates.

Read ``stream`` first.
"""
