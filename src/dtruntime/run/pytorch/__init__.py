"""The parts of a run that need torch, imported only where a program uses it.

`process_group.py` makes torch's group anew for each crew, `gradients.py` averages gradients over
it, `sharded_models.py` saves and restores models of FSDP and DTensors.
"""
