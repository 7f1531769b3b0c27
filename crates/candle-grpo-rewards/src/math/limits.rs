//! Bounds on time and memory. An answer beyond one of them is compared as text.

use std::cell::Cell;

/// The longest expression that is parsed, in bytes.
pub(super) const MAX_EXPRESSION_BYTES: usize = 4096;
/// The end of a text in which numbers are searched that are not in a formula, in bytes.
pub(super) const SEARCHED_BYTES: usize = 4096;
/// The longest number with a unit in words, in bytes.
pub(super) const MAX_UNIT_BYTES: usize = 256;
/// The most formulas that are one answer together.
pub(super) const MAX_FORMULAS: usize = 64;
/// The most tokens of an expression.
pub(super) const MAX_TOKENS: usize = 1500;
/// The deepest nesting: a bracket takes two levels, a sign or a power one.
pub(super) const MAX_DEPTH: usize = 80;
/// The most digits of a written number.
pub(super) const MAX_DIGITS: usize = 1000;
/// The most bits of a numerator or a denominator. Larger powers stay powers.
pub(super) const MAX_BITS: u64 = 4096;
/// The most terms of a sum after expansion.
pub(super) const MAX_TERMS: usize = 400;
/// The largest numerator and denominator of a rational exponent.
pub(super) const MAX_EXPONENT: i64 = 1 << 30;
/// The largest exponent with which a sum is expanded.
pub(super) const MAX_EXPANDED_POWER: i64 = 32;
/// The largest argument of a factorial or a binomial coefficient that is computed. Others stay
/// functions.
pub(super) const MAX_FACTORIAL: u32 = 400;
/// The largest prime that is a divisor in a factorization.
pub(super) const MAX_TRIAL_DIVISOR: u64 = 10_000;
/// The most products of two terms, comparisons of elements, and other steps for one answer.
pub(super) const MAX_STEPS: u64 = 40_000;
/// The most atoms in an atom, such as the argument of a function; a sum has up to eight times as
/// many.
pub(super) const MAX_WEIGHT: usize = 400;

/// The remaining steps of an answer.
pub(super) struct Budget(Cell<u64>);

impl Budget {
    pub(super) fn new() -> Self {
        Self(Cell::new(MAX_STEPS))
    }

    /// Takes `steps`; none if fewer remain.
    pub(super) fn spend(&self, steps: usize) -> Option<()> {
        let left = self.0.get().checked_sub(steps as u64)?;
        self.0.set(left);
        Some(())
    }
}
