"""The engine on a GPU, for shapes of known models with random weights: `python -m load_tests.bench.gpu --help`."""
