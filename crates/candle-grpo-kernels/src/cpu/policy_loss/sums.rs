//! The figures of a policy loss.

use super::surrogate::{Flags, Token};
use crate::policy_loss::PolicySum;

/// One number for each [`PolicySum`].
#[derive(Clone)]
pub(super) struct Sums(pub(super) [f64; PolicySum::COUNT]);

impl Sums {
    /// Of nothing.
    pub(super) fn new() -> Self {
        let mut sums = [0.0; PolicySum::COUNT];
        for largest in LARGEST {
            sums[largest as usize] = f64::NEG_INFINITY;
        }
        sums[PolicySum::RatioMin as usize] = f64::INFINITY;
        Self(sums)
    }

    #[inline(always)]
    pub(super) fn add(&mut self, which: PolicySum, x: f32) {
        self.0[which as usize] += f64::from(x);
    }

    #[inline(always)]
    fn largest(&mut self, which: PolicySum, x: f32) {
        let sum = &mut self.0[which as usize];
        *sum = sum.max(f64::from(x));
    }

    #[inline(always)]
    pub(super) fn add_token(&mut self, token: Token, token_log_ratio: f32, token_ratio: f32) {
        let d = token_log_ratio;
        let k3 = (token_ratio - 1.0) - d;
        self.add(PolicySum::Count, 1.0);
        self.add(PolicySum::Ratio, token.ratio);
        self.largest(PolicySum::RatioMax, token.ratio);
        let smallest = &mut self.0[PolicySum::RatioMin as usize];
        *smallest = smallest.min(f64::from(token.ratio));
        self.largest(PolicySum::TokenRatioMax, token_ratio);
        self.add(PolicySum::K1, -d);
        self.add(PolicySum::Abs, d.abs());
        self.add(PolicySum::K2, d * d * 0.5);
        self.add(PolicySum::K3, k3);
        self.largest(PolicySum::K3Max, k3);
        self.add(PolicySum::LogProb, token.log_prob);
        self.add(PolicySum::OldLogProb, token.old_log_prob);
    }

    #[inline(always)]
    pub(super) fn add_flags(&mut self, flags: Flags) {
        for (which, flag) in flags.counted() {
            self.add(which, f32::from(u8::from(flag)));
        }
    }

    /// These together with those of another row.
    pub(super) fn merged(mut self, other: &Self) -> Self {
        for (index, (sum, x)) in self.0.iter_mut().zip(other.0).enumerate() {
            *sum = if index == PolicySum::RatioMin as usize {
                sum.min(x)
            } else if LARGEST.iter().any(|&largest| largest as usize == index) {
                sum.max(x)
            } else {
                *sum + x
            };
        }
        self
    }
}

const LARGEST: [PolicySum; 3] = [
    PolicySum::RatioMax,
    PolicySum::TokenRatioMax,
    PolicySum::K3Max,
];
