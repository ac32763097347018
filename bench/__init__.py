"""The parts of `benchmark.py`: the work, the runs, what was measured, the report."""
