//! Decodes quantized blocks. Their formats are defined in
//! [ggml](https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h).

use candle_core::quantized::GgmlDType;

/// Dequantizes `blocks` with type `block_type` to `y`.
#[inline(always)]
pub(crate) fn widen(blocks: &[u8], block_type: GgmlDType, y: &mut [f32]) {
    match block_type {
        GgmlDType::Q4_0 => each(blocks, y, q4_0),
        GgmlDType::Q4_1 => each(blocks, y, q4_1),
        GgmlDType::Q5_0 => each(blocks, y, q5_0),
        GgmlDType::Q5_1 => each(blocks, y, q5_1),
        GgmlDType::Q8_0 => each(blocks, y, q8_0),
        GgmlDType::Q4K => each(blocks, y, q4_k),
        GgmlDType::Q5K => each(blocks, y, q5_k),
        GgmlDType::Q6K => each(blocks, y, q6_k),
        // Operator checks reject all other types.
        _ => y.fill(f32::NAN),
    }
}

#[inline(always)]
fn each<const BYTES: usize, const SIZE: usize>(
    blocks: &[u8],
    y: &mut [f32],
    widen: impl Fn(&[u8; BYTES], &mut [f32; SIZE]),
) {
    let (blocks, _) = blocks.as_chunks();
    let (y, _) = y.as_chunks_mut();
    for (block, y) in blocks.iter().zip(y) {
        widen(block, y);
    }
}

/// Returns the f16 value at `place`, which must be finite.
#[inline(always)]
fn half(block: &[u8], place: usize) -> f32 {
    let bits = u32::from(u16::from_le_bytes([block[place], block[place + 1]]));
    // The exponent bias differs. A product corrects it, even for subnormal numbers.
    let scaled = f32::from_bits((bits & 0x7fff) << 13) * f32::from_bits((127 + 112) << 23);
    f32::from_bits(scaled.to_bits() | (bits & 0x8000) << 16)
}

/// Factor (2 bytes), low and high nibbles in 16 bytes.
#[inline(always)]
fn q4_0(block: &[u8; 18], y: &mut [f32; 32]) {
    let d = half(block, 0);
    for i in 0..16 {
        let q = block[2 + i];
        y[i] = (i32::from(q & 15) - 8) as f32 * d;
        y[16 + i] = (i32::from(q >> 4) - 8) as f32 * d;
    }
}

/// Factor and offset, low and high nibbles in 16 bytes.
#[inline(always)]
fn q4_1(block: &[u8; 20], y: &mut [f32; 32]) {
    let (d, offset) = (half(block, 0), half(block, 2));
    for i in 0..16 {
        let q = block[4 + i];
        y[i] = f32::from(q & 15) * d + offset;
        y[16 + i] = f32::from(q >> 4) * d + offset;
    }
}

/// Factor, the fifth bits (4 bytes), low and high nibbles in 16 bytes.
#[inline(always)]
fn q5_0(block: &[u8; 22], y: &mut [f32; 32]) {
    let d = half(block, 0);
    let fifth = u32::from_le_bytes([block[2], block[3], block[4], block[5]]);
    for i in 0..16 {
        let q = u32::from(block[6 + i]);
        let (low, high) = (fifth >> i & 1, fifth >> (16 + i) & 1);
        y[i] = ((q & 15 | low << 4) as i32 - 16) as f32 * d;
        y[16 + i] = ((q >> 4 | high << 4) as i32 - 16) as f32 * d;
    }
}

/// Like [`q5_0`], with an offset after the factor.
#[inline(always)]
fn q5_1(block: &[u8; 24], y: &mut [f32; 32]) {
    let (d, offset) = (half(block, 0), half(block, 2));
    let fifth = u32::from_le_bytes([block[4], block[5], block[6], block[7]]);
    for i in 0..16 {
        let q = u32::from(block[8 + i]);
        let (low, high) = (fifth >> i & 1, fifth >> (16 + i) & 1);
        y[i] = (q & 15 | low << 4) as f32 * d + offset;
        y[16 + i] = (q >> 4 | high << 4) as f32 * d + offset;
    }
}

/// Factor, 32 signed bytes.
#[inline(always)]
fn q8_0(block: &[u8; 34], y: &mut [f32; 32]) {
    let d = half(block, 0);
    for i in 0..32 {
        y[i] = f32::from(block[2 + i] as i8) * d;
    }
}

/// Factor and offset for part `part` in 0..8 in a Q4K or Q5K block, 6 bits each. They are in 12
/// bytes, starting at byte 4.
#[inline(always)]
fn six_bits(block: &[u8], part: usize) -> (f32, f32) {
    let (d, offset) = (half(block, 0), half(block, 2));
    let byte = |i: usize| block[4 + i];
    let (scale, min) = match part {
        0..4 => (byte(part) & 63, byte(part + 4) & 63),
        _ => (
            byte(part + 4) & 15 | byte(part - 4) >> 6 << 4,
            byte(part + 4) >> 4 | byte(part) >> 6 << 4,
        ),
    };
    (d * f32::from(scale), offset * f32::from(min))
}

/// Block factor and offset, factors and offsets for 8 parts, low and high nibbles in 128 bytes.
#[inline(always)]
fn q4_k(block: &[u8; 144], y: &mut [f32; 256]) {
    eight_parts(block, 16, |_| 0, y);
}

/// Like [`q4_k`], with 32 bytes for the fifth bits before the 128 bytes.
#[inline(always)]
fn q5_k(block: &[u8; 176], y: &mut [f32; 256]) {
    eight_parts(block, 48, |i| block[16 + i], y);
}

/// Decodes 8 parts, each either the low or the high nibbles in 32 bytes, starting at byte `start`.
/// `fifth(i)` holds the fifth bits for value `i` in all parts.
#[inline(always)]
fn eight_parts(block: &[u8], start: usize, fifth: impl Fn(usize) -> u8, y: &mut [f32; 256]) {
    for pair in 0..4 {
        let (low, low_offset) = six_bits(block, 2 * pair);
        let (high, high_offset) = six_bits(block, 2 * pair + 1);
        for i in 0..32 {
            let q = block[start + 32 * pair + i];
            let fifth = fifth(i) >> (2 * pair);
            y[64 * pair + i] = low * f32::from(q & 15 | (fifth & 1) << 4) - low_offset;
            y[64 * pair + 32 + i] = high * f32::from(q >> 4 | (fifth & 2) << 3) - high_offset;
        }
    }
}

/// 128 bytes with four bits per value, 64 bytes with two bits per value, 16 signed factors, the
/// block factor.
#[inline(always)]
fn q6_k(block: &[u8; 210], y: &mut [f32; 256]) {
    let d = half(block, 208);
    for part in 0..16 {
        // The block half, the quarter within it, and the half within that.
        let (half, quarter, first) = (part / 8, part / 2 % 4, 16 * (part % 2));
        let scale = d * f32::from(block[192 + part] as i8);
        for i in first..first + 16 {
            let four = block[64 * half + 32 * (quarter % 2) + i] >> (4 * (quarter / 2)) & 15;
            let two = block[128 + 32 * half + i] >> (2 * quarter) & 3;
            let q = i32::from(four | two << 4) - 32;
            y[128 * half + 32 * quarter + i] = scale * q as f32;
        }
    }
}
