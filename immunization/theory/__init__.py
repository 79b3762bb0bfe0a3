"""The mathematics: pure functions in float64 of matrices, without models, data or files (docs/theory.md)."""
