"""The parts of a run that need torch, imported only where a program uses it.

``process_group`` makes torch's group anew for each crew, ``gradients`` averages gradients over
it, ``sharded_models`` saves and restores models of FSDP and DTensors.
"""
