//! Time and memory limits. An answer beyond one of them is compared as text.

use std::cell::Cell;

/// Longest expression that is parsed, in bytes.
pub(super) const MAX_EXPRESSION_BYTES: usize = 4096;
/// Number of bytes at the end of a text that are searched for numbers outside formulas.
pub(super) const SEARCHED_BYTES: usize = 4096;
/// Longest number with a unit in words, in bytes.
pub(super) const MAX_UNIT_BYTES: usize = 256;
/// Maximum number of formulas that form one answer.
pub(super) const MAX_FORMULAS: usize = 64;
/// Maximum number of tokens in an expression.
pub(super) const MAX_TOKENS: usize = 1500;
/// Maximum nesting depth: a bracket counts two levels, a sign or a power one.
pub(super) const MAX_DEPTH: usize = 80;
/// Maximum number of digits in a written number.
pub(super) const MAX_DIGITS: usize = 1000;
/// Maximum number of bits in a numerator or a denominator. Larger powers stay powers.
pub(super) const MAX_BITS: u64 = 4096;
/// Maximum number of terms in an expanded sum.
pub(super) const MAX_TERMS: usize = 400;
/// Largest numerator and denominator in a rational exponent.
pub(super) const MAX_EXPONENT: i64 = 1 << 30;
/// Largest exponent for which a sum is expanded.
pub(super) const MAX_EXPANDED_POWER: i64 = 32;
/// Largest argument for which a factorial or a binomial coefficient is computed. Others stay
/// functions.
pub(super) const MAX_FACTORIAL: u32 = 400;
/// Largest prime divisor in a factorization.
pub(super) const MAX_TRIAL_DIVISOR: u64 = 10_000;
/// Maximum number of steps for one answer, such as term products and element comparisons.
pub(super) const MAX_STEPS: u64 = 40_000;
/// Maximum number of atoms in an atom, such as a function's argument. A sum may have eight times as
/// many.
pub(super) const MAX_WEIGHT: usize = 400;

/// The steps that remain for an answer.
pub(super) struct Budget(Cell<u64>);

impl Budget {
    pub(super) fn new() -> Self {
        Self(Cell::new(MAX_STEPS))
    }

    /// Spends `steps`. Returns `None` if fewer remain.
    pub(super) fn spend(&self, steps: usize) -> Option<()> {
        let left = self.0.get().checked_sub(steps as u64)?;
        self.0.set(left);
        Some(())
    }
}
