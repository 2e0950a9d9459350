"""What ``strata doctor`` looks at: the environment, the way to the coordinator, the machine."""
