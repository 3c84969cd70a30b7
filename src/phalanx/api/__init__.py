"""What users call: `replicate`, the primitive, and `DistributedDataParallel`, torch's contract on the same engine."""
