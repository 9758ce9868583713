"""Shared memory between executors, actors and the learner, one noun a file; numpy only."""
