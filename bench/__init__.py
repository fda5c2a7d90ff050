"""Side-by-side benchmarks: transformers, the engine at gamma 0, the engine with each drafter."""
