//! Moments of AdamW in blocks of 8-bit codes.

use std::sync::LazyLock;

use candle_core::{Device, Result, Shape, Tensor};

/// The numbers of a block.
pub(crate) const NUMBERS: usize = 256;
/// The bytes of a block: a code for each number, and the scale, f32 in little-endian order.
pub(crate) const BYTES: usize = NUMBERS + 4;

/// Returns the shape of a moment of `elements` numbers in blocks, u8 `[blocks, 260]`.
///
/// Each block has 256 codes of a number in [-1, 1] (in [0, 1] for the average of squares) and, as
/// f32, the largest magnitude of its numbers, which is their scale. Codes are those of the dynamic
/// map of bitsandbytes (<https://arxiv.org/abs/2110.02861>): 7 decades, of which each has twice the
/// codes of the one below. Zeros are blocks of zero bytes. A positive average of squares never
/// rounds to zero, which would divide a step by `epsilon`.
///
/// ```
/// assert_eq!(candle_grpo_kernels::moment_blocks(1000).dims(), [4, 260]);
/// ```
pub fn moment_blocks(elements: usize) -> Shape {
    (elements.div_ceil(NUMBERS), BYTES).into()
}

/// Returns the numbers of the codes of [`moment_blocks`]: those of the average of gradients, and
/// those of the average of their squares. Both ascend.
pub fn moment_codes() -> [[f32; 256]; 2] {
    [SIGNED.numbers, UNSIGNED.numbers]
}

/// The numbers of the codes of one of the two moments, in ascending order.
pub(crate) struct CodeMap {
    pub(crate) numbers: [f32; NUMBERS],
    /// The codes of positive numbers by magnitude: 7 decades, and the number 1.
    decades: [Decade; 8],
    /// The code of 0.
    zero: f32,
}

/// Codes at equal distances.
#[derive(Clone, Copy)]
struct Decade {
    /// Larger numbers have these codes, or those of the decades above.
    above: f32,
    /// The product of a number with `factor`, less `offset`, is the place among the codes, rounded
    /// down.
    factor: f32,
    offset: f32,
    first: f32,
    last: f32,
}

/// The least magnitude at which all floats are whole numbers.
const WHOLE: f32 = (1 << 23) as f32;

/// The codes of the average of gradients.
pub(crate) static SIGNED: LazyLock<CodeMap> = LazyLock::new(|| CodeMap::new(true));
/// The codes of the average of squared gradients.
pub(crate) static UNSIGNED: LazyLock<CodeMap> = LazyLock::new(|| CodeMap::new(false));

impl CodeMap {
    fn new(signed: bool) -> Self {
        let zero = if signed { 127 } else { 0 };
        let mut numbers = [0.0; NUMBERS];
        let mut first = zero + 1;
        let decades = std::array::from_fn(|decade| {
            // Parts of the decade from 0.1 to 1, times a power of ten. The middle of a part is a
            // number.
            let (parts, width, start) = match decade {
                7 => (1, 0.0, 1.0),
                _ => {
                    let parts = 1 << if signed { decade } else { decade + 1 };
                    let unit = 10f64.powi(decade as i32 - 6);
                    (parts, 0.9 * unit / f64::from(parts), 0.1 * unit)
                }
            };
            for part in 0..parts {
                numbers[first + part as usize] = start + width * (f64::from(part) + 0.5);
            }
            let (below, own) = (numbers[first - 1], numbers[first]);
            let above = match (decade, signed) {
                // No positive average of squares is zero.
                (0, false) => 0.0,
                _ => (below + own) / 2.0,
            };
            let codes = Decade {
                above: above as f32,
                factor: if width > 0.0 { 1.0 / width } else { 0.0 } as f32,
                offset: if width > 0.0 { start / width } else { 0.0 } as f32,
                first: first as f32,
                last: (first + parts as usize - 1) as f32,
            };
            first += parts as usize;
            codes
        });
        for code in 0..zero {
            numbers[code] = -numbers[2 * zero - code];
        }
        Self {
            numbers: numbers.map(|number| number as f32),
            decades,
            zero: zero as f32,
        }
    }

    /// The code of a number in [-1, 1]: that of the nearest number. It has selects in place of
    /// branches, so that the compiler vectorizes a loop.
    #[inline(always)]
    fn code(&self, number: f32) -> u8 {
        let magnitude = number.abs();
        let (mut factor, mut offset) = (0.0, 0.0);
        let (mut first, mut last) = (self.zero, self.zero);
        for decade in &self.decades {
            let is_above = magnitude > decade.above;
            factor = if is_above { decade.factor } else { factor };
            offset = if is_above { decade.offset } else { offset };
            first = if is_above { decade.first } else { first };
            last = if is_above { decade.last } else { last };
        }
        let place = magnitude * factor - offset;
        let place = if place > 0.0 { place } else { 0.0 };
        // Rounded down: at this magnitude floats are whole numbers.
        let code = first + place - 0.4999;
        let code = if code > 0.0 { code } else { 0.0 };
        let code = code + WHOLE - WHOLE;
        let code = if code < last { code } else { last };
        // The numbers are symmetric but for 1.
        let mirrored = 2.0 * self.zero - code;
        let mirrored = if mirrored > 0.0 { mirrored } else { 0.0 };
        let code = if number < 0.0 { mirrored } else { code };
        // The low bits of this sum are the whole number.
        (code + WHOLE).to_bits() as u8
    }

    /// Reads a block of at most 256 numbers.
    #[inline(always)]
    pub(crate) fn read(&self, block: &[u8], numbers: &mut [f32]) {
        let (codes, scale) = block.split_at(NUMBERS);
        let scale = f32::from_le_bytes([scale[0], scale[1], scale[2], scale[3]]);
        for (number, &code) in numbers.iter_mut().zip(codes) {
            *number = self.numbers[usize::from(code)] * scale;
        }
    }

    /// Writes a block of at most 256 numbers. The codes of others stay.
    #[inline(always)]
    pub(crate) fn write(&self, numbers: &[f32], block: &mut [u8]) {
        let (codes, bytes) = block.split_at_mut(NUMBERS);
        // The largest of every 16th number first, which the compiler vectorizes.
        let mut most = [0f32; 16];
        for numbers in numbers.chunks(16) {
            for (most, number) in most.iter_mut().zip(numbers) {
                let magnitude = number.abs();
                *most = if magnitude > *most { magnitude } else { *most };
            }
        }
        let scale = most.into_iter().fold(0.0, f32::max);
        bytes.copy_from_slice(&scale.to_le_bytes());
        if scale == 0.0 {
            codes.fill(0);
            return;
        }
        for (code, number) in codes.iter_mut().zip(numbers) {
            *code = self.code(number / scale);
        }
    }

    /// The numbers of a moment in blocks, f32 of the shape `shape`, computed on the CPU.
    pub(crate) fn read_blocks(&self, blocks: &Tensor, shape: &Shape) -> Result<Tensor> {
        let bytes = blocks.detach().to_device(&Device::Cpu)?;
        let bytes = bytes.flatten_all()?.to_vec1::<u8>()?;
        let mut numbers = vec![0.0; shape.elem_count()];
        for (block, numbers) in bytes.chunks(BYTES).zip(numbers.chunks_mut(NUMBERS)) {
            self.read(block, numbers);
        }
        Tensor::from_vec(numbers, shape, blocks.device())
    }

    /// The blocks of the numbers of a moment, computed on the CPU.
    pub(crate) fn write_blocks(&self, numbers: &Tensor) -> Result<Tensor> {
        let shape = moment_blocks(numbers.elem_count());
        let values = numbers.to_device(&Device::Cpu)?;
        let values = values.flatten_all()?.to_vec1::<f32>()?;
        let mut bytes = vec![0; shape.elem_count()];
        for (numbers, block) in values.chunks(NUMBERS).zip(bytes.chunks_mut(BYTES)) {
            self.write(numbers, block);
        }
        Tensor::from_vec(bytes, shape, numbers.device())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_numbers_are_those_of_the_dynamic_map() {
        for (map, zero, least, below_one) in [
            (&*SIGNED, 127, 0.55e-6, 0.992_968_75),
            (&*UNSIGNED, 0, 0.325e-6, 0.996_484_4),
        ] {
            assert!(map.numbers.is_sorted());
            assert_eq!((map.numbers[zero], map.numbers[255]), (0.0, 1.0));
            assert!((map.numbers[zero + 1] - least).abs() < 1e-12);
            assert!((map.numbers[254] - below_one).abs() < 1e-7);
        }
        let signed = &SIGNED.numbers;
        assert!((0..127).all(|i| signed[i] == -signed[254 - i]));
    }

    fn nearest(map: &CodeMap, number: f32) -> f32 {
        let distance = |x: &f32| (f64::from(*x) - f64::from(number)).abs();
        let nearest = map.numbers.into_iter();
        nearest
            .min_by(|a, b| distance(a).total_cmp(&distance(b)))
            .unwrap_or(0.0)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(20000))]
        #[test]
        fn a_code_is_that_of_the_nearest_number(power in -9f32..0.0, negative in any::<bool>()) {
            let number = 10f32.powf(power);
            let found = |map: &CodeMap, number: f32| map.numbers[usize::from(map.code(number))];
            let distance = |a: f32, b: f32| (a - b).abs();
            let signed = if negative { -number } else { number };
            let expected = nearest(&SIGNED, signed);
            // A border between two codes is off by 1e-4 of their distance, which is 4e-4 here.
            prop_assert!(
                distance(found(&SIGNED, signed), signed) <= distance(expected, signed) * (1.0 + 1e-3)
            );
            let expected = nearest(&UNSIGNED, number).max(UNSIGNED.numbers[1]);
            prop_assert!(
                distance(found(&UNSIGNED, number), number) <= distance(expected, number) * (1.0 + 1e-3)
            );
        }
    }

    #[test]
    fn codes_of_all_numbers_are_their_own_and_the_ends_are_kept() {
        for map in [&*SIGNED, &*UNSIGNED] {
            for (code, &number) in map.numbers.iter().enumerate() {
                assert_eq!(usize::from(map.code(number)), code, "{number}");
            }
            assert_eq!(f32::from(map.code(f32::NAN)), map.zero);
            assert_eq!(map.code(f32::INFINITY), 255);
        }
        assert_eq!(
            SIGNED.numbers[usize::from(SIGNED.code(-1.0))],
            SIGNED.numbers[0]
        );
    }

    #[test]
    fn a_block_keeps_its_largest_number_and_zeros() {
        let numbers: Vec<f32> = (0..256).map(|i| (i as f32 - 100.0) * 1e-3).collect();
        let mut block = [7; BYTES];
        SIGNED.write(&numbers, &mut block);
        let mut read = [0.0; NUMBERS];
        SIGNED.read(&block, &mut read);
        assert_eq!((read[255], read[100]), (numbers[255], 0.0));
        for (read, number) in read.iter().zip(&numbers) {
            assert!(
                (read - number).abs() <= 0.008 * numbers[255],
                "{read} {number}"
            );
        }
        UNSIGNED.write(&[0.0; NUMBERS], &mut block);
        assert_eq!(block, [0; BYTES]);
        UNSIGNED.read(&[0; BYTES], &mut read);
        assert_eq!(read, [0.0; NUMBERS]);
    }
}
