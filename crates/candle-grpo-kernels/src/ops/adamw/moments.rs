//! AdamW moments in blocks of 8-bit codes.

use std::sync::LazyLock;

use candle_core::{Device, Result, Shape, Tensor};

/// Values per block in [`moment_blocks`].
pub const NUMBERS_IN_BLOCK: usize = 256;
/// Bytes per block: a code for each value, and the scale, f32 in little-endian order.
pub(crate) const BYTES: usize = NUMBERS_IN_BLOCK + 4;

/// Returns the shape for a moment with `elements` values in blocks, u8 `[blocks, 260]`.
///
/// Each block holds 256 codes, and the largest magnitude in the block as an f32 scale. A code
/// stands for a value in [-1, 1] (in [0, 1] for the squared average). Codes follow the dynamic map
/// in bitsandbytes (<https://arxiv.org/abs/2110.02861>): 7 decades, each with twice as many codes
/// as the one below. Zeros are blocks of zero bytes. A positive squared average never rounds to
/// zero, because the step would then be divided by `epsilon`.
///
/// ```
/// assert_eq!(candle_grpo_kernels::moment_blocks(1000).dims(), [4, 260]);
/// ```
pub fn moment_blocks(elements: usize) -> Shape {
    (elements.div_ceil(NUMBERS_IN_BLOCK), BYTES).into()
}

/// Returns the values for all [`moment_blocks`] codes: first for the gradient average, then for the
/// squared average. Both ascend.
pub fn moment_codes() -> [[f32; 256]; 2] {
    [SIGNED.numbers, UNSIGNED.numbers]
}

/// The values for one moment's codes, in ascending order.
pub(crate) struct CodeMap {
    pub(crate) numbers: [f32; NUMBERS_IN_BLOCK],
    /// The code for 0.
    zero: u8,
    /// The code for the smallest magnitude in each cell. Floats in one cell share their exponent
    /// and their first fraction bits. A cell contains at most one boundary between two codes.
    cells: [u8; CELLS],
    /// For each code, the bits of the smallest magnitude with a larger code.
    next: [u32; NUMBERS_IN_BLOCK],
}

/// The float bits that do not determine its cell.
const CELL_BITS: u32 = 15;
/// The cell for 2^-22, which also stands for everything smaller.
const FIRST_CELL: u32 = (127 - 22) << (23 - CELL_BITS);
/// The cell for 1.
const LAST_CELL: u32 = 127 << (23 - CELL_BITS);
const CELLS: usize = (LAST_CELL - FIRST_CELL + 1) as usize;

/// Defines the codes for magnitudes. [`CodeMap`] tabulates them.
struct Decades {
    /// 7 decades, and the value 1.
    decades: [Decade; 8],
    /// The code for 0.
    zero: f32,
}

/// Evenly spaced codes.
#[derive(Clone, Copy)]
struct Decade {
    /// Larger values have these codes, or those in the decades above.
    above: f32,
    /// A value times `factor`, less `offset`, is its place among the codes, rounded down.
    factor: f32,
    offset: f32,
    first: f32,
    last: f32,
}

/// A float's sign bit.
const SIGN: u32 = 1 << 31;
/// The smallest magnitude from which all floats are whole numbers.
const WHOLE: f32 = (1 << 23) as f32;

/// Codes for the gradient average.
pub(crate) static SIGNED: LazyLock<CodeMap> = LazyLock::new(|| CodeMap::new(true));
/// Codes for the squared gradient average.
pub(crate) static UNSIGNED: LazyLock<CodeMap> = LazyLock::new(|| CodeMap::new(false));

impl Decades {
    /// Returns the decades, and the values for their codes.
    fn new(signed: bool) -> (Self, [f64; NUMBERS_IN_BLOCK]) {
        let zero = if signed { 127 } else { 0 };
        let mut numbers = [0.0; NUMBERS_IN_BLOCK];
        let mut first = zero + 1;
        let decades = std::array::from_fn(|decade| {
            // Divides the decade from 0.1 to 1, times a power of ten. The middle of each part is a
            // value.
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
                // No positive squared average is zero.
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
        let zero = zero as f32;
        (Self { decades, zero }, numbers)
    }

    /// Returns the code for a magnitude up to 1.
    fn code(&self, magnitude: f32) -> u8 {
        let (mut factor, mut offset) = (0.0, 0.0);
        let (mut first, mut last) = (self.zero, self.zero);
        for decade in &self.decades {
            if magnitude > decade.above {
                (factor, offset) = (decade.factor, decade.offset);
                (first, last) = (decade.first, decade.last);
            }
        }
        let place = (magnitude * factor - offset).max(0.0);
        // Rounds down: at this magnitude, floats are whole numbers.
        let code = (first + place - 0.4999).max(0.0) + WHOLE - WHOLE;
        code.min(last) as u8
    }

    /// Returns the bits of the smallest magnitude with a larger code than `code`, which must not be
    /// the last.
    fn least_bits_above(&self, code: u8) -> u32 {
        let (mut below, mut least) = (0, 1f32.to_bits());
        while below < least {
            let middle = (below + least) / 2;
            if self.code(f32::from_bits(middle)) > code {
                least = middle
            } else {
                below = middle + 1
            }
        }
        least
    }
}

impl CodeMap {
    fn new(signed: bool) -> Self {
        let (decades, mut numbers) = Decades::new(signed);
        let zero = decades.zero as usize;
        for code in 0..zero {
            numbers[code] = -numbers[2 * zero - code];
        }
        let next = std::array::from_fn(|code| {
            if (zero..NUMBERS_IN_BLOCK - 1).contains(&code) {
                decades.least_bits_above(code as u8)
            } else {
                u32::MAX
            }
        });
        let cells = std::array::from_fn(|cell| match cell {
            0 => zero as u8,
            _ => decades.code(f32::from_bits((FIRST_CELL + cell as u32) << CELL_BITS)),
        });
        Self {
            numbers: numbers.map(|number| number as f32),
            zero: zero as u8,
            cells,
            next,
        }
    }

    /// Returns the code for a number in [-1, 1], which is the nearest value's.
    #[inline(always)]
    fn code(&self, number: f32) -> u8 {
        let bits = number.to_bits();
        let magnitude = bits & !SIGN;
        // NaN gets the code for 0.
        let magnitude = if magnitude > f32::INFINITY.to_bits() {
            0
        } else {
            magnitude
        };
        let cell = (magnitude >> CELL_BITS).clamp(FIRST_CELL, LAST_CELL) - FIRST_CELL;
        let code = self.cells[cell as usize];
        let code = code + u8::from(magnitude >= self.next[usize::from(code)]);
        // The values are symmetric except for 1. Signs are random, so a branch would be slow.
        let mirrored = (2 * self.zero).saturating_sub(code);
        let is_negative = ((bits >> 31) as u8).wrapping_neg();
        (code & !is_negative) | (mirrored & is_negative)
    }

    /// Decodes a block with at most 256 values.
    #[inline(always)]
    pub(crate) fn read(&self, block: &[u8], numbers: &mut [f32]) {
        let (codes, scale) = block.split_at(NUMBERS_IN_BLOCK);
        let scale = f32::from_le_bytes([scale[0], scale[1], scale[2], scale[3]]);
        for (number, &code) in numbers.iter_mut().zip(codes) {
            *number = self.numbers[usize::from(code)] * scale;
        }
    }

    /// Encodes a block with at most 256 values. Codes after them do not change.
    #[inline(always)]
    pub(crate) fn write(&self, numbers: &[f32], block: &mut [u8]) {
        let (codes, bytes) = block.split_at_mut(NUMBERS_IN_BLOCK);
        // Takes the maximum over every 16th value first, so that the compiler vectorizes it.
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
        // The compiler vectorizes the quotients, but not a loop with a table lookup.
        let mut quotients = [0.0; NUMBERS_IN_BLOCK];
        for (quotient, number) in quotients.iter_mut().zip(numbers) {
            *quotient = number / scale;
        }
        for (code, &quotient) in codes.iter_mut().zip(&quotients[..numbers.len()]) {
            *code = self.code(quotient);
        }
    }

    /// Decodes a moment in blocks to f32 with shape `shape`, on the CPU.
    pub(crate) fn read_blocks(&self, blocks: &Tensor, shape: &Shape) -> Result<Tensor> {
        let bytes = blocks.detach().to_device(&Device::Cpu)?;
        let bytes = bytes.flatten_all()?.to_vec1::<u8>()?;
        let mut numbers = vec![0.0; shape.elem_count()];
        for (block, numbers) in bytes
            .chunks(BYTES)
            .zip(numbers.chunks_mut(NUMBERS_IN_BLOCK))
        {
            self.read(block, numbers);
        }
        Tensor::from_vec(numbers, shape, blocks.device())
    }

    /// Encodes a moment in blocks, on the CPU.
    pub(crate) fn write_blocks(&self, numbers: &Tensor) -> Result<Tensor> {
        let shape = moment_blocks(numbers.elem_count());
        let values = numbers.to_device(&Device::Cpu)?;
        let values = values.flatten_all()?.to_vec1::<f32>()?;
        let mut bytes = vec![0; shape.elem_count()];
        for (numbers, block) in values.chunks(NUMBERS_IN_BLOCK).zip(bytes.chunks_mut(BYTES)) {
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
            // A boundary between two codes is off by 1e-4 of their distance, which is 4e-4 here.
            prop_assert!(
                distance(found(&SIGNED, signed), signed) <= distance(expected, signed) * (1.0 + 1e-3)
            );
            let expected = nearest(&UNSIGNED, number).max(UNSIGNED.numbers[1]);
            prop_assert!(
                distance(found(&UNSIGNED, number), number) <= distance(expected, number) * (1.0 + 1e-3)
            );
        }
    }

    /// Checks around each boundary, and at evenly spaced floats.
    #[test]
    fn the_table_has_the_codes_of_the_decades() {
        for (map, decades) in [
            (&*SIGNED, Decades::new(true).0),
            (&*UNSIGNED, Decades::new(false).0),
        ] {
            let borders = map.next.iter().filter(|&&bits| bits != u32::MAX);
            let around = borders.flat_map(|&bits| bits - 1..=bits + 1);
            let steps = (0..=1f32.to_bits()).step_by(1013);
            for bits in around.chain(steps).chain([1f32.to_bits()]) {
                let magnitude = f32::from_bits(bits);
                let code = decades.code(magnitude);
                assert_eq!(map.code(magnitude), code, "{magnitude}");
                let mirrored = (2 * map.zero).saturating_sub(code);
                assert_eq!(map.code(-magnitude), mirrored, "-{magnitude}");
            }
        }
    }

    #[test]
    fn codes_of_all_numbers_are_their_own_and_the_ends_are_kept() {
        for map in [&*SIGNED, &*UNSIGNED] {
            for (code, &number) in map.numbers.iter().enumerate() {
                assert_eq!(usize::from(map.code(number)), code, "{number}");
            }
            assert_eq!(map.code(f32::NAN), map.zero);
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
        let mut read = [0.0; NUMBERS_IN_BLOCK];
        SIGNED.read(&block, &mut read);
        assert_eq!((read[255], read[100]), (numbers[255], 0.0));
        for (read, number) in read.iter().zip(&numbers) {
            assert!(
                (read - number).abs() <= 0.008 * numbers[255],
                "{read} {number}"
            );
        }
        UNSIGNED.write(&[0.0; NUMBERS_IN_BLOCK], &mut block);
        assert_eq!(block, [0; BYTES]);
        UNSIGNED.read(&[0; BYTES], &mut read);
        assert_eq!(read, [0.0; NUMBERS_IN_BLOCK]);
    }
}
