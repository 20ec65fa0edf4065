"""The benchmark: YAML configuration -> harness -> results -> tables and plots. `rewy bench` drives it."""
