"""The parts of ``python -m bench.gpu_check``."""
