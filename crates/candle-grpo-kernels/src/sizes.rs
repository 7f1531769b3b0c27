//! Sizes of memory that grows, or is reused for other sizes.

/// Returns `n` or less than a quarter more, and at most `step` - 1 more: one of few sizes, so that
/// memory of about the same size is reused, and rarely grows.
///
/// ```
/// use candle_grpo_kernels::with_room;
///
/// let sizes = [8, 9, 33, 1000].map(|n| with_room(n, usize::MAX));
/// assert_eq!(sizes, [8, 10, 40, 1024]);
/// assert_eq!(with_room(1000, 16), 1008);
/// ```
pub fn with_room(n: usize, step: usize) -> usize {
    n.next_multiple_of((n.next_power_of_two() / 8).clamp(1, step))
}

/// Returns the smallest number of rows of `row_bytes` bytes whose memory is a multiple of `unit`
/// bytes.
///
/// ```
/// use candle_grpo_kernels::rows_without_rest;
///
/// assert_eq!(rows_without_rest(96, 64), 2);
/// ```
pub fn rows_without_rest(row_bytes: usize, unit: usize) -> usize {
    fn greatest_common_divisor(a: usize, b: usize) -> usize {
        if b == 0 {
            a
        } else {
            greatest_common_divisor(b, a % b)
        }
    }
    unit / greatest_common_divisor(unit, row_bytes)
}
