"""The parts of a run that need torch, imported only if the program uses it.

``process_group`` makes torch's group for each crew, ``gradients`` averages gradients over it, and
``sharded_models`` saves and restores models of FSDP and DTensors.
"""
