//! Tests that cross crates; the tests themselves are in `tests/tests`.

/// Compiles and runs the code of the README.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
struct Readme;

/// Compiles the code of the guide.
#[cfg(doctest)]
#[doc = include_str!("../../docs/guide.md")]
struct Guide;
