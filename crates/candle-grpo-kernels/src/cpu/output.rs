//! Allocation of results.

use std::mem::{ManuallyDrop, MaybeUninit};

/// Returns a vector of `len` elements that `fill` writes, without zeroing them first.
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
    // SAFETY: `MaybeUninit<T>` has the layout of `T`. The parts are those of one vector, which is
    // not dropped. The caller guarantees that every element is written.
    unsafe { Vec::from_raw_parts(memory.as_mut_ptr().cast(), len, memory.capacity()) }
}

/// Returns two vectors, as [`filled`].
///
/// # Safety
///
/// `fill` must write every element of both.
#[allow(unsafe_code)]
pub(crate) unsafe fn two_filled<T: Copy>(
    len: usize,
    fill: impl FnOnce(&mut [MaybeUninit<T>], &mut [MaybeUninit<T>]),
) -> (Vec<T>, Vec<T>) {
    let mut second = Vec::new();
    // SAFETY: the caller guarantees that `fill` writes every element of both.
    let first = unsafe {
        filled(len, |first| {
            second = filled(len, |second| fill(first, second))
        })
    };
    (first, second)
}
