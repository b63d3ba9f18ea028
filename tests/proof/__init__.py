"""What checks the promise as a whole: the simulator, the soak, stale reads, and faults under the archive."""
