//! Allocates results.

use std::mem::{ManuallyDrop, MaybeUninit};

/// Returns a vector with `len` elements that `fill` writes, without zeroing them first.
///
/// # Safety
///
/// `fill` must write every element.
#[allow(unsafe_code)]
pub(crate) unsafe fn filled<T: Copy>(
    len: usize,
    fill: impl FnOnce(&mut [MaybeUninit<T>]),
) -> Vec<T> {
    let mut memory = Vec::<MaybeUninit<T>>::with_capacity(len);
    // SAFETY: the capacity is `len`, and uninitialized memory is a valid `MaybeUninit`.
    unsafe { memory.set_len(len) };
    fill(&mut memory);
    let mut memory = ManuallyDrop::new(memory);
    // SAFETY: `MaybeUninit<T>` has the same layout as `T`. The parts come from one vector, which is
    // not dropped. The caller guarantees that every element is written.
    unsafe { Vec::from_raw_parts(memory.as_mut_ptr().cast(), len, memory.capacity()) }
}

/// Like [`filled`], for two vectors.
///
/// # Safety
///
/// `fill` must write every element in both.
#[allow(unsafe_code)]
pub(crate) unsafe fn two_filled<T: Copy>(
    len: usize,
    fill: impl FnOnce(&mut [MaybeUninit<T>], &mut [MaybeUninit<T>]),
) -> (Vec<T>, Vec<T>) {
    let mut second = Vec::new();
    // SAFETY: the caller guarantees that `fill` writes every element in both.
    let first = unsafe {
        filled(len, |first| {
            second = filled(len, |second| fill(first, second))
        })
    };
    (first, second)
}
