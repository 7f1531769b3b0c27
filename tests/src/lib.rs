//! Tests that cross crates; the tests themselves are in `tests/tests`.
