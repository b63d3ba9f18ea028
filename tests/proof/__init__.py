"""What checks the promise as a whole: the simulator, the soak, stale reads, deaths at every step, and faults under the
archive."""
