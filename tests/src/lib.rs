//! Tests that cross crates; the tests themselves are in `tests/tests`.

/// The README's code runs.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
struct Readme;
