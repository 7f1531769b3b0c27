//! Rounding of an updated parameter to its dtype.

use half::bf16;

/// The rounding of an updated parameter to its dtype.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Rounding {
    /// Rounds to the nearest value. Without a master, steps below the precision of the dtype are
    /// lost. The default.
    #[default]
    Nearest,
    /// Rounds a bf16 parameter up or down at random, with the exact value as the mean
    /// (<https://arxiv.org/abs/2010.06192>). Small steps then add up without a master, in a third
    /// of its memory.
    ///
    /// The random numbers are those of Philox (<https://doi.org/10.1145/2063384.2063405>, with the
    /// constants and the 10 rounds of PyTorch and NumPy). They depend on the key, the place of the
    /// element and [`AdamWStep::step`](crate::AdamWStep::step) only: a resumed run draws the same
    /// numbers, on any device, and so do all ranks.
    Stochastic {
        /// The key of the parameter. Give each parameter its own.
        key: u64,
        /// The place of the first element in its parameter, a multiple of 8. It is above 0 if the
        /// tensor is a part of the parameter.
        first: u64,
    },
}

/// The random numbers of a step, from one element of a parameter on.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Random {
    pub(crate) key: u64,
    pub(crate) step: u32,
    /// The counter of the first element. A counter gives the numbers of [`EIGHT`] elements.
    pub(crate) eight: u64,
}

/// Random numbers per counter.
pub(crate) const EIGHT: u64 = 8;
/// Counters at a time: loops over them become vectors.
const COUNTERS: usize = 32;

impl Random {
    /// Returns the random numbers after those of `elements`, a multiple of 8.
    #[inline(always)]
    pub(crate) fn after(self, elements: usize) -> Self {
        Self {
            eight: self.eight + elements as u64 / EIGHT,
            ..self
        }
    }

    /// Fills `numbers` with those of the first elements.
    #[inline(always)]
    pub(crate) fn fill(self, numbers: &mut [u16]) {
        const GROUP: usize = COUNTERS * EIGHT as usize;
        for (at, group) in numbers.chunks_mut(GROUP).enumerate() {
            let words = self.after(at * GROUP).words();
            for (i, number) in group.iter_mut().enumerate() {
                // Element 2w has the low half of word w, and element 2w + 1 the high half.
                let word = words[i % 8 / 2][i / 8];
                *number = (word >> (16 * (i % 2))) as u16;
            }
        }
    }

    /// The words of the first counters.
    #[inline(always)]
    fn words(self) -> [[u32; COUNTERS]; 4] {
        let [mut a, mut b, mut c, mut d] = [[0; COUNTERS]; 4];
        for i in 0..COUNTERS {
            let counter = self.eight.wrapping_add(i as u64);
            (a[i], b[i], c[i], d[i]) = (counter as u32, (counter >> 32) as u32, self.step, 0);
        }
        let mut keys = [self.key as u32, (self.key >> 32) as u32];
        for _ in 0..10 {
            for i in 0..COUNTERS {
                let first = u64::from(a[i]) * 0xD251_1F53;
                let second = u64::from(c[i]) * 0xCD9E_8D57;
                a[i] = (second >> 32) as u32 ^ b[i] ^ keys[0];
                b[i] = second as u32;
                c[i] = (first >> 32) as u32 ^ d[i] ^ keys[1];
                d[i] = first as u32;
            }
            keys = [
                keys[0].wrapping_add(0x9E37_79B9),
                keys[1].wrapping_add(0xBB67_AE85),
            ];
        }
        [a, b, c, d]
    }
}

/// Rounds `value` down if the part that bf16 lacks, of 16 bits, is small beside `random`, and up
/// otherwise.
#[inline(always)]
pub(crate) fn stochastic(value: f32, random: u16) -> bf16 {
    let bits = value.to_bits().wrapping_add(u32::from(random));
    if value.is_finite() {
        bf16::from_bits((bits >> 16) as u16)
    } else {
        bf16::from_f32(value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The vectors of Random123 for `philox4x32`, 10 rounds.
    #[test]
    fn words_are_those_of_philox() {
        let zero = Random {
            key: 0,
            step: 0,
            eight: 0,
        };
        assert_eq!(
            zero.words().map(|word| word[0]),
            [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]
        );
    }

    #[test]
    fn numbers_depend_on_their_place_only() {
        let random = Random {
            key: 7,
            step: 3,
            eight: 5,
        };
        let mut all = [0; 1000];
        random.fill(&mut all);
        for from in [0, 8, 256, 992] {
            let mut part = vec![0; (1000 - from).min(300)];
            random.after(from).fill(&mut part);
            assert_eq!(part, all[from..from + part.len()]);
        }
        let mut others = [0; 1000];
        for other in [Random { key: 8, ..random }, Random { step: 4, ..random }] {
            other.fill(&mut others);
            let equal = all.iter().zip(&others).filter(|(a, b)| a == b).count();
            assert!(equal < 3, "{equal}");
        }
    }

    /// Over all random numbers, the mean is exact.
    #[test]
    fn the_mean_is_the_value() {
        for value in [1.0f32, 1.001, -0.337_123, 3e-39, 1e30, 0.0, -2.5e-7] {
            let rounded =
                (0..=u16::MAX).map(|random| f64::from(stochastic(value, random).to_f32()));
            let mean = rounded.sum::<f64>() / 65_536.0;
            let value = f64::from(value);
            assert!(
                (mean - value).abs() <= value.abs() * 1e-12,
                "{value}: {mean}"
            );
        }
        for value in [f32::INFINITY, f32::NEG_INFINITY] {
            assert_eq!(stochastic(value, u16::MAX).to_f32(), value);
        }
        assert!(stochastic(f32::NAN, u16::MAX).is_nan());
    }
}
